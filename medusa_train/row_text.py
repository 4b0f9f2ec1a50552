"""A training row on a terminal, with what is learnt in colour."""

from __future__ import annotations

from rich.text import Text

LONGEST_PIECE = 600  # characters of one piece that are shown


def row_text(pieces: list[tuple[str, bool]], in_colour: bool) -> Text:
    """A row with what is learnt in green, or between double brackets; long pieces lose their middle."""
    text = Text()
    for piece, learnt in pieces:
        shown = printable(piece)
        if len(shown) > LONGEST_PIECE:
            half = LONGEST_PIECE // 2
            shown = f"{shown[:half]} … {shown[-half:]}"
        if in_colour:
            text.append(shown, style="green" if learnt else "dim")
        else:
            text.append(f"[[{shown}]]" if learnt else shown)
    return text


def printable(text: str) -> str:
    """Text from a data set must not steer the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
