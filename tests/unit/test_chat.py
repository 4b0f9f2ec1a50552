"""Chat rendering: which tokens an assistant wrote, what opens a turn, and what is refused."""

from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from medusa_train.data.chat import encode_conversation, load_chat_tokenizer, render_prompt, user_turn_opening
from medusa_train.inference import UserError

SYSTEM = {"role": "system", "content": "the cat is on the mat"}
QUESTION = {"role": "user", "content": "what is this ?"}
ANSWER = {"role": "assistant", "content": "the cat sat"}
SECOND_QUESTION = {"role": "user", "content": "and the mat ?"}
SECOND_ANSWER = {"role": "assistant", "content": "on the mat is the cat"}


@pytest.fixture
def tokenizer(tiny_chat_folder: Path) -> PreTrainedTokenizerBase:
    return load_chat_tokenizer(str(tiny_chat_folder))


def pieces_of(tokenizer, *texts):
    """Ids of the texts, one after the other, and the span of each."""
    ids, spans = [], []
    for text in texts:
        piece = tokenizer(text, add_special_tokens=False)["input_ids"]
        spans.append((len(ids), len(ids) + len(piece)))
        ids += piece
    return ids, spans


def test_an_answer_is_learnt_with_its_end_token_but_not_the_newline_behind(tokenizer):
    ids, spans = encode_conversation(tokenizer, [SYSTEM, QUESTION, ANSWER])
    expected, places = pieces_of(
        tokenizer,
        "<|im_start|>system\nthe cat is on the mat<|im_end|>\n",
        "<|im_start|>user\nwhat is this ?<|im_end|>\n<|im_start|>assistant\n",
        "the cat sat<|im_end|>",
        "\n",
    )
    assert ids == expected
    assert spans == [places[2]]


def test_every_answer_of_a_conversation_has_its_own_span(tokenizer):
    ids, spans = encode_conversation(tokenizer, [QUESTION, ANSWER, SECOND_QUESTION, SECOND_ANSWER])
    expected, places = pieces_of(
        tokenizer,
        "<|im_start|>user\nwhat is this ?<|im_end|>\n<|im_start|>assistant\n",
        "the cat sat<|im_end|>",
        "\n<|im_start|>user\nand the mat ?<|im_end|>\n<|im_start|>assistant\n",
        "on the mat is the cat<|im_end|>",
        "\n",
    )
    assert ids == expected
    assert spans == [places[1], places[3]]


def test_the_end_token_is_learnt_although_it_is_the_padding_token_too(tokenizer):
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    ids, spans = encode_conversation(tokenizer, [QUESTION, ANSWER, SECOND_QUESTION, SECOND_ANSWER])
    assert [ids[end - 1] for _, end in spans] == [tokenizer.eos_token_id] * 2


def test_a_turn_that_ends_with_another_token_than_eos_is_learnt_up_to_that_token(tokenizer):
    tokenizer.eos_token = "<|im_start|>"  # as with Gemma, whose turns end with <end_of_turn> and texts with <eos>
    ids, spans = encode_conversation(tokenizer, [QUESTION, ANSWER])
    assert [tokenizer.decode(ids[start:end]) for start, end in spans] == ["the cat sat<|im_end|>"]


def test_a_conversation_may_start_with_the_assistant(tokenizer):
    ids, spans = encode_conversation(tokenizer, [ANSWER, QUESTION, SECOND_ANSWER])
    expected, places = pieces_of(
        tokenizer,
        "<|im_start|>assistant\n",
        "the cat sat<|im_end|>",
        "\n<|im_start|>user\nwhat is this ?<|im_end|>\n<|im_start|>assistant\n",
        "on the mat is the cat<|im_end|>",
        "\n",
    )
    assert ids == expected
    assert spans == [places[1], places[3]]


def test_what_follows_the_last_answer_is_left_out(tokenizer):
    answered = encode_conversation(tokenizer, [QUESTION, ANSWER])
    assert encode_conversation(tokenizer, [QUESTION, ANSWER, SECOND_QUESTION]) == answered


@pytest.mark.parametrize("messages", [[], [QUESTION], [SYSTEM, QUESTION]])
def test_a_conversation_without_an_answer_is_refused(tokenizer, messages):
    with pytest.raises(UserError, match="no assistant turn"):
        encode_conversation(tokenizer, messages)


def test_a_template_that_changes_the_opening_once_it_is_answered_is_refused(tokenizer):
    tokenizer.chat_template += "{% if add_generation_prompt %}think{% endif %}"
    with pytest.raises(UserError, match="differently once it is answered"):
        encode_conversation(tokenizer, [QUESTION, ANSWER])


def test_an_earlier_answer_that_the_template_shortens_is_not_learnt(tokenizer):
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message['content']",
        "(message['content'] if loop.last or message['role'] == 'user' else message['content'][:3])",
    )
    ids, spans = encode_conversation(tokenizer, [QUESTION, ANSWER, SECOND_QUESTION, SECOND_ANSWER])
    assert [tokenizer.decode(ids[start:end]) for start, end in spans] == ["on the mat is the cat<|im_end|>"]


def test_a_prompt_ends_with_the_opening_of_the_answer(tokenizer):
    expected, _ = pieces_of(tokenizer, "<|im_start|>user\nwhat is this ?<|im_end|>\n<|im_start|>assistant\n")
    assert render_prompt(tokenizer, [QUESTION]) == expected


def test_special_tokens_come_from_the_template_alone(tokenizer):
    plain = render_prompt(tokenizer, [QUESTION])
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)]
    )
    assert tokenizer("cat")["input_ids"][0] == start  # the tokenizer would add one of its own
    assert render_prompt(tokenizer, [QUESTION]) == plain


def test_texts_are_neither_cut_nor_padded_whatever_the_tokenizers_file_says(tokenizer, tiny_chat_folder):
    plain = encode_conversation(load_chat_tokenizer(str(tiny_chat_folder)), [QUESTION, ANSWER])
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    assert encode_conversation(tokenizer, [QUESTION, ANSWER]) == plain


def test_a_user_turn_opens_with_the_template_and_ends_with_its_mark(tokenizer):
    expected, _ = pieces_of(tokenizer, "<|im_start|>user\n")
    assert user_turn_opening(tokenizer) == (expected, tokenizer.convert_tokens_to_ids("<|im_end|>"))


@pytest.mark.parametrize(
    "template",
    [
        "<|im_start|>user\n<|im_end|>",  # the user's words are not shown
        "<|im_start|>user\n{{ messages[0]['content'] }}\n",  # nothing but space behind them
        "{{ messages[0]['content'] }}<|im_end|>",  # nothing before them
    ],
)
def test_a_template_without_marks_around_a_user_turn_cannot_open_one(tokenizer, template):
    tokenizer.chat_template = template
    with pytest.raises(UserError, match="no mark around a user's turn"):
        user_turn_opening(tokenizer)


def test_a_model_without_chat_template_is_refused_until_a_file_gives_one(tokenizer, tmp_path):
    template = tokenizer.chat_template
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"set backbone\.chat_template=FILE"):
        load_chat_tokenizer(str(tmp_path))

    file = tmp_path / "chatml.jinja"
    file.write_text(template, encoding="utf-8")
    given = load_chat_tokenizer(str(tmp_path), str(file))
    tokenizer.chat_template = template
    assert render_prompt(given, [QUESTION]) == render_prompt(tokenizer, [QUESTION])


def test_a_template_file_that_is_not_there_is_named(tiny_chat_folder, tmp_path):
    missing = tmp_path / "none.jinja"
    with pytest.raises(UserError, match=r"none\.jinja: No such file"):
        load_chat_tokenizer(str(tiny_chat_folder), str(missing))
