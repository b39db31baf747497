"""What is generated: E7, ends of an answer, and the same tokens however the KV is read."""

from __future__ import annotations

import pytest
import torch

from pc_rag.config import EngineConfig
from pc_rag.engine import PromptCache
from pc_rag.errors import LayoutError
from pc_rag.kv.memory_tier import MemoryTier
from pc_rag.model.conversation import ChatMessage
from pc_rag.model.loading import wrap_model
from pc_rag.model.sampling import GenerationConfig
from pc_rag.types import FinishReason, Role
from tests.support.engines import chunk_request, ingest, reference_ids, scripted, tiny_engine
from tests.support.tiny_models import FAMILIES, tiny_model

PROMPT = "The quick brown fox"


def generated(engine, token_ids, **options):
    """What ``model.generate`` appends, without the end-of-sequence token."""
    eos_ids = engine.loaded.tokenizer.eos_ids
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0} | options
    ids = engine.loaded.model.generate(torch.tensor([token_ids]), **options)
    new = ids[0, len(token_ids) :].tolist()
    return tuple(new[:-1] if new[-1] in eos_ids else new)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("repetition_penalty", [1.0, 1.4])
def test_e7_uncached_arm_equals_generate(family, repetition_penalty):
    """E7: greedy ids and text of a text prompt are those of ``model.generate``."""
    engine = tiny_engine(family)
    config = GenerationConfig(max_new_tokens=20, repetition_penalty=repetition_penalty)
    answer = engine.generate(PROMPT, config, reuse=False)
    prompt_ids = engine.plan(PROMPT).plan.token_ids
    assert prompt_ids == tuple(PROMPT.encode())
    expected = generated(engine, prompt_ids, repetition_penalty=repetition_penalty)
    assert answer.token_ids == expected
    assert answer.text == engine.loaded.tokenizer.decode(expected)


def test_e7_chunks_equal_generate_when_reuse_is_off():
    """E7: the uncached arm of a composed prompt is an ordinary generation over the same ids."""
    engine = tiny_engine()
    request = chunk_request(engine, "ab", repair="link:3")
    answer = engine.generate(request, GenerationConfig(max_new_tokens=20), reuse=False)
    assert answer.token_ids == generated(engine, request.plan.token_ids)


def test_e7_generation_ends_where_generate_ends_when_eos_comes():
    """The end-of-sequence token ends the answer and is not part of it."""
    model, tokenizer = tiny_model("llama")
    free = PromptCache.from_pretrained(wrap_model(model, tokenizer))
    ids = free.generate(PROMPT, GenerationConfig(max_new_tokens=20)).token_ids
    model.generation_config.eos_token_id = ids[7]
    engine = PromptCache.from_pretrained(wrap_model(model, tokenizer))
    answer = engine.generate(PROMPT, GenerationConfig(max_new_tokens=20))
    assert answer.token_ids == ids[: ids.index(ids[7])]
    assert answer.token_ids == generated(engine, engine.plan(PROMPT).plan.token_ids)
    assert answer.finish_reason is FinishReason.STOP


def test_answer_is_empty_when_the_first_token_ends_it():
    """No token, no text, no TTFT; the request still counts."""
    engine = tiny_engine()
    with scripted(engine, ""):
        answer = engine.generate(PROMPT)
    assert (answer.text, answer.token_ids) == ("", ())
    assert answer.finish_reason is FinishReason.STOP
    assert answer.metrics.ttft_seconds is None
    assert engine.stats.snapshot().total.num_requests == 1


@pytest.mark.parametrize("labels", ["", "a", "abc"])
@pytest.mark.parametrize("repair", ["none", "link:5"])
def test_settled_and_unsettled_generations_give_the_same_tokens(labels, repair):
    """Few tokens are decoded from stored KV in place, many from a contiguous buffer."""
    engine = tiny_engine("qwen3", config=EngineConfig(prefix_cache_bytes=0))
    request = chunk_request(engine, labels, repair=repair)
    ingest(engine, request)
    long = engine.generate(request, GenerationConfig(max_new_tokens=12))
    short = engine.generate(request, GenerationConfig(max_new_tokens=4))
    assert short.token_ids == long.token_ids[:4]
    assert long.token_ids == reference_ids(engine, request, 12)


def test_seeded_sampling_is_the_same_over_stored_kv_and_without():
    """The same seed draws the same tokens where the logits are exact; another seed others."""
    engine = tiny_engine()
    request = chunk_request(engine, "a", separator="")

    def ids(seed, *, reuse):
        config = GenerationConfig(max_new_tokens=12, temperature=0.8, top_p=0.9, seed=seed)
        return engine.generate(request, config, reuse=reuse).token_ids

    assert ids(1, reuse=True) == ids(1, reuse=True) == ids(1, reuse=False)
    assert ids(1, reuse=True) != ids(2, reuse=True)


def test_repetition_penalty_sees_stored_tokens_too():
    """The penalty counts tokens of stored chunks, not only those that were computed."""
    engine = tiny_engine()
    request = chunk_request(engine, "a", separator="")
    config = GenerationConfig(max_new_tokens=12, repetition_penalty=1.5)
    cached = engine.generate(request, config)
    assert cached.token_ids == engine.generate(request, config, reuse=False).token_ids
    assert (
        cached.token_ids == generated(engine, request.plan.token_ids, repetition_penalty=1.5)[:12]
    )


def test_pitfall_22_max_new_tokens_is_kept():
    """Pitfall 22: three tokens asked for, three given, finish reason length."""
    engine = tiny_engine()
    for prompt in (PROMPT, chunk_request(engine, "ab")):
        answer = engine.generate(prompt, GenerationConfig(max_new_tokens=3))
        assert len(answer.token_ids) == 3
        assert answer.metrics.num_generated_tokens == 3
        assert answer.finish_reason is FinishReason.LENGTH


def test_pitfall_17_answer_does_not_start_with_the_prompt():
    """Pitfall 17: the answer is the new tokens only, streamed or not."""
    engine = tiny_engine(only_ascii=True)
    with scripted(engine, "Fine."):
        answer = engine.generate(PROMPT)
    assert answer.text == "Fine."
    with scripted(engine, "Fine."), engine.stream(PROMPT) as stream:
        assert "".join(stream) == "Fine."


STOPS = [
    (("\nUser",), "Yes.\nUser: more", "Yes."),
    (("\nUser:",), "Yes.\nUsers are", "Yes.\nUsers are"),
    (("END", "."), "a END b.", "a "),
    (("b", "abc"), "xxab", "xxa"),
    (("é",), "café au lait", "caf"),
    (("Yes",), "Yes", ""),
    (("lait",), "au lai", "au lai"),
]


@pytest.mark.parametrize(("stop", "answer", "expected"), STOPS)
def test_pitfall_18_nothing_of_a_stop_string_is_emitted(stop, answer, expected):
    """Pitfall 18: stop strings over token borders, the same in stream and generate."""
    engine = tiny_engine()
    config = GenerationConfig(max_new_tokens=len(answer.encode()), stop=stop)
    with scripted(engine, answer):
        whole = engine.generate(PROMPT, config)
    with scripted(engine, answer), engine.stream(PROMPT, config) as stream:
        pieces = list(stream)
    assert whole.text == "".join(pieces) == stream.completion.text == expected
    assert all(pieces)
    is_stopped = expected != answer
    assert whole.finish_reason is (FinishReason.STOP if is_stopped else FinishReason.LENGTH)


def test_generation_ends_with_the_token_that_completes_a_stop_string():
    """No token is computed behind a stop."""
    engine = tiny_engine()
    with scripted(engine, "ab.cdef"):
        answer = engine.generate(PROMPT, GenerationConfig(stop=(".",)))
    assert answer.token_ids == tuple(b"ab.")


@pytest.mark.parametrize("seed", range(6))
def test_pitfall_21_joined_stream_equals_decode_when_bytes_are_arbitrary(seed):
    """Pitfall 21: a random model emits any bytes; nothing is lost, doubled or made up."""
    engine = tiny_engine(seed=seed)
    with engine.stream(PROMPT, GenerationConfig(max_new_tokens=60)) as stream:
        pieces = list(stream)
    ids = stream.completion.token_ids
    text = engine.loaded.tokenizer.decode(ids)
    assert "".join(pieces) == stream.completion.text == text
    assert all(pieces)
    assert len(ids) >= 40


@pytest.mark.parametrize("text", ["日本語のテキスト", "👩‍👩‍👧 🇩🇪 ok", "naïve café — ½"])
def test_pitfall_21_no_replacement_character_when_bytes_come_one_by_one(text):
    """Pitfall 21: characters of several bytes are held back until they are whole."""
    engine = tiny_engine()
    with scripted(engine, text), engine.stream(PROMPT) as stream:
        pieces = list(stream)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(pieces) > 1


def test_character_that_never_completes_is_shown_when_the_answer_ends():
    """Bytes cut off by the token limit appear as decode shows them."""
    engine = tiny_engine()
    with scripted(engine, "a日"):
        answer = engine.generate(PROMPT, GenerationConfig(max_new_tokens=2))
    assert answer.text == engine.loaded.tokenizer.decode(answer.token_ids)
    assert answer.text.startswith("a\ufffd")


def test_request_is_refused_when_it_does_not_fit_the_context():
    """A prompt that leaves no room is a LayoutError with the numbers, before anything runs."""
    engine = tiny_engine(config=EngineConfig(context_limit=32))
    with pytest.raises(LayoutError, match=r"33 of 32"):
        engine.stream("x" * 33)
    with pytest.raises(LayoutError, match=r"32 of 32"):
        engine.generate("x" * 32)
    with pytest.raises(LayoutError, match="context overflow"):
        engine.generate(chunk_request(engine, "abc"))
    assert engine.stats.snapshot().total.num_requests == 0
    assert len(engine.generate("x" * 31).token_ids) == 1


def test_answer_is_cut_when_max_new_tokens_exceed_the_context():
    """What does not fit is not generated; finish reason length, the numbers say so."""
    engine = tiny_engine(max_position_embeddings=40)
    answer = engine.generate("x" * 30, GenerationConfig(max_new_tokens=500))
    assert len(answer.token_ids) == 10
    assert answer.finish_reason is FinishReason.LENGTH
    unlimited = tiny_engine().generate("x" * 30, GenerationConfig(max_new_tokens=10))
    assert answer.token_ids == unlimited.token_ids


def test_settled_buffer_has_room_when_the_answer_fills_the_context():
    """The whole budget fits behind stored chunks, too."""
    engine = tiny_engine(config=EngineConfig(context_limit=300))
    request = chunk_request(engine, "abc")
    answer = engine.generate(request, GenerationConfig(max_new_tokens=10_000))
    assert len(answer.token_ids) == 300 - request.plan.end


def test_bfloat16_answers_equal_generate():
    """A bfloat16 model gives generate's first tokens, and the same twice over stored KV."""
    engine = tiny_engine(dtype=torch.bfloat16)
    answer = engine.generate(PROMPT, GenerationConfig(max_new_tokens=4), reuse=False)
    assert answer.token_ids == generated(engine, engine.plan(PROMPT).plan.token_ids)[:4]
    request = chunk_request(engine, "abc", repair="link:2")
    first = engine.generate(request, GenerationConfig(max_new_tokens=12))
    assert (
        first.token_ids == engine.generate(request, GenerationConfig(max_new_tokens=12)).token_ids
    )


def test_model_of_the_caller_is_as_it_was_when_requests_are_done():
    """Between requests the model is its owner's: generate gives what it gave before."""
    model, tokenizer = tiny_model("llama")
    ids = torch.tensor([list(PROMPT.encode())])
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    before = model.generate(ids, **options)
    implementation = model.config._attn_implementation
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = PromptCache(wrap_model(model, tokenizer), MemoryTier(1 << 20))
    engine.generate(chunk_request(engine, "ab"), GenerationConfig(max_new_tokens=8))
    with engine.stream([ChatMessage(Role.USER, "Hi")]) as stream:
        next(stream)
        assert torch.equal(model.generate(ids, **options), before)
    assert torch.equal(model.generate(ids, **options), before)
    assert model.config._attn_implementation == implementation
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name])
