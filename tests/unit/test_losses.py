"""The loss, against a slow sum written from its formula, and its gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import KINDS, SHAPING_CONFIGS, make_llama, make_shaping_model, reading
from medusa_train.data.dataset import IGNORED
from medusa_train.inference import Backbone, HeadsConfig, MedusaHeads
from medusa_train.losses import LossWeights, medusa_loss
from medusa_train.trainer import HeadsForTraining

HIDDEN, VOCAB, HEADS = 8, 12, 3


EMBEDDING = torch.nn.functional.embedding  # (ids, table)
TABLE = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(5))


def embed(ids):
    return EMBEDDING(ids, TABLE)


def normed(ids):
    """What heads read of a token, by its formula."""
    return embed(ids) / embed(ids).square().mean(-1, keepdim=True).sqrt()


def heads_and_batch(batch=7, draft=None, seed=0, kind="medusa"):
    torch.manual_seed(seed)
    ids = None if draft is None else torch.tensor(draft)
    heads = MedusaHeads(HeadsConfig(HEADS, 1, HIDDEN, VOCAB, 0 if draft is None else len(draft), **reading(kind)), ids)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    labels = torch.randint(0, VOCAB, (batch, HEADS))
    labels[torch.rand(batch, HEADS).cummin(dim=1).values < 0.2] = IGNORED  # an answer that ended stays ended
    roots = torch.randint(0, VOCAB, (batch,))
    columns = torch.full((VOCAB,), IGNORED)
    columns[heads.draft_token_ids] = torch.arange(len(heads.draft_token_ids))
    projection = torch.randn(VOCAB, HIDDEN)[heads.draft_token_ids]
    hidden, teacher = torch.randn(batch, HIDDEN), torch.randn(batch, HEADS, HIDDEN)
    copies = labels.where(torch.rand(batch, HEADS) < 0.7, torch.randint(0, VOCAB, (batch, HEADS))).clamp(min=0)
    copies[torch.rand(batch) < 0.3] = -1
    return heads, hidden, roots, teacher, labels, copies, projection, columns


def slow_loss(heads, hidden, roots, teacher, labels, copies, projection, columns, weights):
    """The formula of the module, one position and head at a time."""
    pairs = int((labels != IGNORED).sum())
    total, reached = torch.zeros(()), [1.0] * len(hidden)
    for k in range(HEADS):
        for t in range(len(hidden)):
            if labels[t, k] == IGNORED:
                continue
            before = [int(roots[t]), *labels[t, :k].tolist()]
            follows = [c >= 0 and (heads.config.kind == "medusa" or before[1 : at + 1] == copies[t, :at].tolist())
                       for at, c in enumerate(copies[t, : k + 1])]  # fmt: skip
            copied = [normed(c) if same else torch.zeros(HIDDEN) for c, same in zip(copies[t], follows, strict=False)]
            log_q = heads(hidden[t], k, normed(torch.tensor(before)), torch.stack(copied)).log_softmax(-1)
            warmth = weights.soft_temperature
            p = (projection @ teacher[t, k] / warmth).softmax(-1)
            hard = -log_q[columns[labels[t, k]]] if columns[labels[t, k]] != IGNORED else torch.zeros(())
            soft = warmth**2 * (p * (p.log() - (log_q / warmth).log_softmax(-1))).sum()
            one = (1 - weights.soft_share) * hard + weights.soft_share * soft
            total = total + weights.scale * weights.decay**k * one * HEADS / pairs * reached[t]
            if weights.by_acceptance:
                inside = columns[labels[t, k]] != IGNORED
                reached[t] *= float(log_q[columns[labels[t, k]]].exp()) if inside else 0.0
    return total


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draft", [None, [1, 4, 7, 11]])
@pytest.mark.parametrize(
    "weights",
    [
        LossWeights(), LossWeights(2.0, 0.5, 0.0), LossWeights(1.0, 0.9, 1.0), LossWeights(1.0, 0.9, 0.6, 2.0),
        LossWeights(1.0, 0.9, 0.6, 2.0, by_acceptance=True), LossWeights(2.0, 1.0, 0.0, by_acceptance=True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("chunk", [1, 3, 1024])
def test_loss_and_gradients_equal_the_formula(kind, draft, weights, chunk):
    heads, *batch = heads_and_batch(draft=draft, kind=kind)
    loss = medusa_loss(heads, *batch, weights, chunk=chunk, embed=embed).loss
    loss.backward()
    ours = [parameter.grad.clone() for parameter in heads.parameters()]
    heads.zero_grad()
    reference = slow_loss(heads, *batch, weights)
    reference.backward()
    assert float(loss) == pytest.approx(float(reference), rel=1e-5)
    for gradient, parameter in zip(ours, heads.parameters(), strict=True):
        assert torch.allclose(gradient, parameter.grad, atol=1e-6)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 9), st.integers(1, 6))
def test_accumulation_with_unequal_counts_gives_the_gradient_of_the_whole_batch(seed, cut):
    heads, hidden, roots, teacher, labels, copies, projection, columns = heads_and_batch(seed=seed)
    pairs = (labels != IGNORED).sum()
    medusa_loss(heads, hidden, roots, teacher, labels, copies, projection, columns, LossWeights()).loss.backward()
    whole = [parameter.grad.clone() for parameter in heads.parameters()]
    heads.zero_grad()
    for part in (slice(0, cut), slice(cut, None)):
        medusa_loss(
            heads,
            hidden[part],
            roots[part],
            teacher[part],
            labels[part],
            copies[part],
            projection,
            columns,
            LossWeights(),
            num_items=pairs,
        ).loss.backward()
    for gradient, parameter in zip(whole, heads.parameters(), strict=True):
        assert torch.allclose(gradient, parameter.grad, atol=1e-5)


def test_a_batch_without_targets_gives_zero_and_not_nan():
    heads, hidden, roots, teacher, labels, copies, projection, columns = heads_and_batch()
    loss = medusa_loss(
        heads, hidden, roots, teacher, torch.full_like(labels, IGNORED), copies, projection, columns, LossWeights()
    ).loss
    loss.backward()
    assert float(loss) == 0
    assert all(float(parameter.grad.abs().sum()) == 0 for parameter in heads.parameters())


def test_every_head_learns_and_each_has_its_own_term():
    heads, *batch = heads_and_batch(batch=40)
    medusa_loss(heads, *batch, LossWeights()).loss.backward()
    for head in heads.heads:
        assert all(float(parameter.grad.abs().sum()) > 0 for parameter in head.parameters())
    labels = batch[3]
    for k in range(HEADS):
        alone = labels.clone()  # medusa heads do not read what came before, so these labels may have holes
        alone[:, [j for j in range(HEADS) if j != k]] = IGNORED
        heads.zero_grad()
        medusa_loss(heads, *batch[:3], alone, *batch[4:], LossWeights()).loss.backward()
        moved = [sum(float(p.grad.abs().sum()) for p in head.parameters()) > 0 for head in heads.heads]
        assert moved == [j == k for j in range(HEADS)]


def test_padding_a_batch_does_not_change_the_soft_loss():
    heads, hidden, roots, teacher, labels, copies, projection, columns = heads_and_batch()
    padded = torch.cat([labels, torch.full((5, HEADS), IGNORED)])
    more_hidden, more_teacher = torch.randn(5, HIDDEN), torch.randn(5, HEADS, HIDDEN)
    weights = LossWeights(soft_share=1.0)
    short = medusa_loss(heads, hidden, roots, teacher, labels, copies, projection, columns, weights).loss
    long = medusa_loss(
        heads,
        torch.cat([hidden, more_hidden]),
        torch.cat([roots, roots[:5]]),
        torch.cat([teacher, more_teacher]),
        padded,
        torch.cat([copies, copies[:5]]),
        projection,
        columns,
        weights,
    ).loss
    assert float(short) == pytest.approx(float(long), rel=1e-6)


def test_scaled_or_capped_logits_enter_the_loss():
    heads, *batch = heads_and_batch()
    plain = medusa_loss(heads, *batch, LossWeights()).loss
    capped = medusa_loss(heads, *batch, LossWeights(), shape_logits=lambda logits: torch.tanh(logits / 0.5) * 0.5).loss
    assert float(plain) != pytest.approx(float(capped), rel=1e-3)


@pytest.mark.parametrize("soft_share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", ["llama", *SHAPING_CONFIGS])
def test_fresh_heads_have_the_loss_of_the_backbones_own_logits(name, soft_share):
    """They say what the backbone says: cross entropy and divergence are those of its logits, scaled or capped."""
    model = make_llama() if name == "llama" else make_shaping_model(name)
    backbone = Backbone.wrap(model)
    ids = torch.randint(0, 64, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden, said = backbone.hidden_states(ids)[0], model(ids).logits[0].log_softmax(-1)
    heads = MedusaHeads.for_backbone(backbone, HeadsConfig(2, 1, 32, 64))
    weights = LossWeights(decay=0.5, soft_share=soft_share)
    labels = torch.stack([ids[0, 2:8], ids[0, 3:9]], dim=1)
    copies, teacher = torch.full((6, 2), -1), torch.stack([hidden[1:7], hidden[2:8]], dim=1)
    found = HeadsForTraining(heads, backbone, weights)(
        hidden=hidden[:6], roots=ids[0, 1:7], teacher_hidden=teacher, labels=labels, copies=copies
    )
    expected = torch.zeros(2)
    for k in (1, 2):
        for t in range(6):
            hard = -said[t, ids[0, t + k + 1]]
            soft = (said[t + k].exp() * (said[t + k] - said[t])).sum()
            expected[k - 1] += (1 - soft_share) * hard + soft_share * soft
    torch.testing.assert_close(found["sums"], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["loss"].detach(), (expected * torch.tensor([1, 0.5])).sum() / 6, rtol=1e-4, atol=0)


@pytest.mark.parametrize("chunk", [2, 1024])
def test_the_parts_of_the_heads_make_the_loss(chunk):
    heads, *batch = heads_and_batch(batch=9)
    weights = LossWeights(2.0, 0.5, 0.3)
    loss, sums, counts = medusa_loss(heads, *batch, weights, chunk=chunk)
    assert counts.tolist() == (batch[3] != IGNORED).sum(dim=0).tolist()
    weighted = sum(weights.scale * weights.decay**k * float(sums[k]) for k in range(HEADS))
    assert float(loss) == pytest.approx(weighted * HEADS / int(counts.sum()), rel=1e-5)
    assert not sums.requires_grad
