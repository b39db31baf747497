"""Sampling equals transformers' and keeps to itself."""

from __future__ import annotations

import pytest
import torch

from pc_rag.errors import ConfigError
from pc_rag.model.sampling import GenerationConfig, Sampler
from tests.support.tiny_models import tiny_model

PROMPT = [72, 101, 108, 108, 111, 32, 72, 101, 10]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", eos_token_id=None)[0]


def generate_ours(model, config):
    sampler = Sampler(config, CPU)
    ids = torch.tensor(PROMPT)
    for _ in range(config.max_new_tokens):
        with torch.no_grad():
            logits = model(ids[None]).logits[0, -1]
        ids = torch.cat([ids, torch.tensor([sampler.sample(logits, ids)])])
    return ids[len(PROMPT) :].tolist()


def generate_theirs(model, config, **options):
    with torch.random.fork_rng(devices=[]):
        if config.seed is not None:
            torch.manual_seed(config.seed)
        output = model.generate(
            torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
            max_new_tokens=config.max_new_tokens,
            do_sample=not config.is_greedy,
            repetition_penalty=config.repetition_penalty,
            eos_token_id=None,
            pad_token_id=0,
            **options,
        )
    return output[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("penalty", [1.0, 1.7, 0.05])
def test_greedy_equals_generate_when_temperature_is_zero(model, penalty):
    """E7's part: the same ids as transformers, prompt tokens penalised too."""
    config = GenerationConfig(max_new_tokens=12, repetition_penalty=penalty)
    assert generate_ours(model, config) == generate_theirs(model, config)


def test_penalty_changes_the_answer_when_it_is_set(model):
    """The setting reaches the logits: below 1, what was said is said again."""
    plain = generate_ours(model, GenerationConfig(max_new_tokens=12))
    assert plain != generate_ours(
        model, GenerationConfig(max_new_tokens=12, repetition_penalty=0.05)
    )


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7, "top_k": 20},
        {"temperature": 1.3, "top_p": 0.8, "top_k": 50},
        {"temperature": 1.0, "min_p": 0.1, "top_k": 300},
    ],
)
def test_seeded_sampling_equals_generate_when_settings_are_equal(model, options):
    """The same processors in the same order, drawn by the same generator."""
    config = GenerationConfig(max_new_tokens=12, seed=7, **options)
    assert generate_ours(model, config) == generate_theirs(model, config, **options)


def test_seeded_sampling_is_reproducible_when_the_global_state_moves(model):
    """A seed decides the answer; torch's global state neither decides it nor is moved by it."""
    config = GenerationConfig(max_new_tokens=12, temperature=1.5, seed=3)
    torch.manual_seed(1)
    first = generate_ours(model, config)
    state = torch.get_rng_state()
    torch.rand(5)
    assert generate_ours(model, config) == first
    torch.set_rng_state(state)
    generate_ours(model, config)
    assert torch.equal(torch.get_rng_state(), state)
    other = GenerationConfig(max_new_tokens=12, temperature=1.5, seed=4)
    assert generate_ours(model, other) != first


def test_answers_differ_when_no_seed_is_given():
    """Without a seed each generation draws its own, also after the same global seed."""
    logits = torch.zeros(10_000)
    drawn = set()
    for _ in range(4):
        torch.manual_seed(0)
        sampler = Sampler(GenerationConfig(temperature=1.0), CPU)
        drawn.add(sampler.sample(logits, torch.empty(0, dtype=torch.long)))
    assert len(drawn) > 1


def test_logits_are_unchanged_when_a_token_is_chosen():
    """What the caller lends stays as it was."""
    logits = torch.randn(50)
    before = logits.clone()
    config = GenerationConfig(temperature=0.5, top_k=3, top_p=0.5, repetition_penalty=2.0, seed=0)
    Sampler(config, CPU).sample(logits, torch.arange(20))
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "values",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": 2.5},
        {"max_new_tokens": True},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -1},
        {"repetition_penalty": 0},
        {"seed": -1},
        {"seed": 1.5},
        {"stop": "text"},
        {"stop": ("",)},
        {"temperature": "hot"},
    ],
    ids=repr,
)
def test_value_is_refused_when_out_of_range(values):
    """The message names the setting and the value."""
    with pytest.raises(ConfigError, match=next(iter(values))):
        GenerationConfig(**values)
