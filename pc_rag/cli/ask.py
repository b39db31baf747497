"""``pc-rag ask``: a question to a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pc_rag.cli import options
from pc_rag.cli.output import out, print_json, say, write

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pc_rag.corpus import Answer, Corpus, RetrievedChunk
    from pc_rag.model.sampling import GenerationConfig


def ask(
    *,
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="Any text.")],
    store: options.Store,
    model: options.Model = None,
    k: Annotated[int, typer.Option("-k", metavar="N", min=1, help="Most chunks to read.")] = 4,
    where: Annotated[
        list[str] | None,
        typer.Option(
            "--where",
            metavar="KEY=VALUE",
            help="Read only documents with this metadata, such as file_name=guide.md; repeatable.",
        ),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Answer from the same prompt without stored KV too."),
    ] = False,
    show_chunks: Annotated[
        bool, typer.Option("--show-chunks", help="Print the chunks before the answer.")
    ] = False,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", metavar="N", min=1, help="Longest answer, in tokens.")
    ] = 256,
    temperature: Annotated[
        float, typer.Option("--temperature", metavar="T", min=0.0, help="0 is greedy.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float,
        typer.Option(
            "--repetition-penalty", metavar="P", help="Above 1 makes repetition less likely."
        ),
    ] = 1.0,
    seed: Annotated[
        int | None,
        typer.Option("--seed", metavar="N", min=0, help="Seed of a temperature above 0."),
    ] = None,
    dtype: options.Dtype = None,
    device: options.Device = "auto",
    config: options.ConfigFile = None,
    embedder: options.Embedder = None,
    as_json: options.AsJson = False,
) -> None:
    """Answer a question from the nearest chunks of a store, with their KV read and not computed.

    The answer streams to stdout; what it cost goes to stderr. With --compare both arms answer from
    the same prompt, and their times to the first token are shown side by side.
    """
    metadata = _parse_where(where or [])
    from pc_rag.cli.answers import answer_dict, chunk_dicts, describe_usage
    from pc_rag.cli.opening import Choice, open_corpus, say_if_other_model, warm_up
    from pc_rag.cli.store_folder import StoreFolder
    from pc_rag.model.sampling import GenerationConfig

    folder = StoreFolder(store)
    folder.require()
    generation = GenerationConfig(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    choice = Choice(model=model, dtype=dtype, device=device, embedder=embedder, config_file=config)
    with open_corpus(folder, choice) as opened:
        say_if_other_model(opened)
        warm_up(opened.corpus, generates=compare)
        asking = _Asking(opened.corpus, question, k, metadata, generation, is_quiet=as_json)
        if compare:
            _compare(asking, shows_chunks=show_chunks)
            return
        answer = asking.run(shows_chunks=show_chunks)
    if as_json:
        chunks = chunk_dicts(answer.chunks)
        print_json({"question": question, "chunks": chunks, **answer_dict(answer)})
    say(describe_usage(answer.completion.metrics), style="dim")


class _Asking:
    """One question, to be asked by either arm."""

    def __init__(
        self,
        corpus: Corpus,
        question: str,
        k: int,
        where: Mapping[str, str],
        generation: GenerationConfig,
        *,
        is_quiet: bool,
    ) -> None:
        self.corpus = corpus
        self.question = question
        self.k = k
        self.where = where
        self.generation = generation
        self.is_quiet = is_quiet

    def run(self, *, shows_chunks: bool = False, reuse: bool | None = None) -> Answer:
        """Ask; unless quiet, chunks and text go to stdout as they come."""
        from pc_rag.corpus import Answer

        answer = self.corpus.stream(
            self.question, self.k, where=self.where, config=self.generation, reuse=reuse
        )
        if not answer.chunks:
            say("note: the store has no chunk to read for this question", style="yellow")
        if shows_chunks and not self.is_quiet:
            _show_chunks(answer.chunks)
        with answer.stream as pieces:
            for piece in pieces:
                if not self.is_quiet:
                    write(piece)
        if not self.is_quiet:
            write("\n")
        return Answer(answer.stream.completion, answer.chunks)


def _compare(asking: _Asking, *, shows_chunks: bool) -> None:
    from pc_rag.cli.answers import Comparison, comparison_dict, describe_usage, ttft_table

    def title(text: str) -> None:
        if not asking.is_quiet:
            out.print(text, style="bold")

    title("cached:")
    cached = asking.run(shows_chunks=shows_chunks, reuse=True)
    title("\nuncached:")
    uncached = asking.run(reuse=False)
    comparison = Comparison(asking.question, cached, uncached)
    if asking.is_quiet:
        print_json(comparison_dict(comparison))
    else:
        out.print()
        out.print(ttft_table(comparison))
    say("measured after a warm-up request, one sample an arm", style="dim")
    say(describe_usage(cached.completion.metrics), style="dim")


def _show_chunks(chunks: Sequence[RetrievedChunk]) -> None:
    for number, chunk in enumerate(chunks, start=1):
        out.print(
            f"[{number}] {', '.join(chunk.sources)} (score {chunk.score:.2f})",
            style="bold",
            soft_wrap=True,
        )
        out.print(f"{chunk.text}\n", soft_wrap=True)


def _parse_where(pairs: Sequence[str]) -> dict[str, str]:
    metadata = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not name or not separator:
            raise typer.BadParameter(f"{pair!r} is not KEY=VALUE", param_hint="--where")
        metadata[name] = value
    return metadata
