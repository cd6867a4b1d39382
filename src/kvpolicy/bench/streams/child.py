"""One streaming run in a process of its own: ``python -m kvpolicy.bench.streams.child PARENT``.

A dying engine takes its process down, fills its output with traces and leaves threads behind; here it can do
all that without harm to the command that started it. The job comes as one JSON object on standard input.
Messages go out as JSON lines on standard output; whatever else wants to print there is sent to standard
error, which is a log file. PARENT is the process id of the one that started it (which may be gone before this one
could ask for it).
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from typing import TYPE_CHECKING, Any

from attrs import asdict

from kvpolicy.bench.processes.child import describe, end_with, take_over_stdout
from kvpolicy.bench.streams.records import ChunkRow, EngineKind, Outcome, StreamSettings
from kvpolicy.bench.streams.text import take_chunks

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpolicy.adapters.vllm import Reply
    from kvpolicy.bench.processes.child import Send


def main() -> None:
    """Run the job on standard input and report it on standard output."""
    end_with(int(sys.argv[1]))
    send = take_over_stdout()
    job = json.loads(sys.stdin.read())
    settings = StreamSettings(**job["settings"])
    asyncio.run(_run(EngineKind(job["kind"]), settings, job["text"], send))


async def _run(kind: EngineKind, settings: StreamSettings, text: str, send: Send) -> None:
    send("stage", text="importing vLLM")
    # Here, so that the parent hears of it: this imports vLLM.
    from kvpolicy.bench.streams import engines

    send("stage", text="loading the model and starting the engine")
    engine = None
    try:
        engine = engines.start_engine(settings.engine_arguments(), stock=kind is EngineKind.STOCK)
        send("started", facts=engines.facts(engine))
        await _stream(engines, engine, settings, text, send)
    except engines.ENGINE_DEAD as error:
        _send_end(send, Outcome.DIED, error)
    except Exception as error:  # noqa: BLE001 - whatever ends the run is its result, and the parent shows it
        _send_end(send, Outcome.FAILED, error)
    else:
        send("end", outcome=Outcome.FINISHED.value)
    finally:
        if engine is not None:
            engine.shutdown()


def _send_end(send: Send, outcome: Outcome, error: Exception) -> None:
    send("end", outcome=outcome.value, error=describe(error))


async def _stream(engines: Any, engine: Any, settings: StreamSettings, text: str, send: Send) -> None:  # noqa: ANN401 - vLLM's
    tokenizer = engine.get_tokenizer()

    def count(piece: str) -> int:
        return len(tokenizer.encode(piece, add_special_tokens=False))

    chunks = take_chunks(text, settings.num_chunks, max_tokens=settings.chunk_tokens, count=count)
    measure = _memory_probe()
    session = engines.open_session(
        engine,
        system_prompt=settings.system_prompt,
        sampling=settings.sampling(),
        retention=settings.retention(),
    )
    for number, chunk in enumerate(chunks, start=1):
        reply = await session.push(chunk, seed=number)
        row = _row(number, count(chunk), reply, position=session.next_position(), memory=measure())
        send("row", row=asdict(row))
    await session.close()


def _row(number: int, text_tokens: int, reply: Reply, *, position: int, memory: int | None) -> ChunkRow:
    return ChunkRow(
        chunk=number,
        ttft_s=reply.ttft_s,
        total_s=reply.total_s,
        text_tokens=text_tokens,
        reply=reply.text,
        reply_tokens=len(reply.token_ids),
        resident_tokens=reply.resident_tokens,
        num_blocks=reply.num_blocks,
        num_evicted_tokens=reply.num_evicted_tokens,
        consolidated=reply.consolidated,
        next_position=position,
        host_memory_bytes=memory,
    )


def _memory_probe() -> Callable[[], int | None]:
    """Return a function that measures this process and its children; without psutil it returns None."""
    try:
        psutil = importlib.import_module("psutil")
    except ModuleNotFoundError:
        return lambda: None
    here = psutil.Process()

    def measure() -> int | None:
        processes = [here, *here.children(recursive=True)]
        return sum(int(process.memory_info().rss) for process in processes if process.is_running())

    return measure


if __name__ == "__main__":
    main()
