"""One engine of the benchmark in a process of its own: ``python -m kvpolicy.bench.decode.child PARENT``.

The first line on standard input is the job (engine arguments and policy); each later one is a workload, answered with
one row. Messages go out as JSON lines on standard output; whatever else wants to print there goes to standard error,
which is a log file. The engine's core lives in this process, so that each step can be timed and told apart by what it
did to the requests.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import asdict, define, evolve, field

from kvpolicy.bench.decode.cases import Workload
from kvpolicy.bench.decode.steps import RunRow, Step, decoded_tokens, summarise_steps
from kvpolicy.bench.processes.child import describe, end_with, take_over_stdout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvpolicy.bench.processes.child import Send

# How often the parent hears that a run goes on.
_BEAT_S = 1.0
# Columns of /proc/stat: user, nice, system, irq, softirq, steal (time that another machine on the same host had).
_BUSY = (0, 1, 2, 5, 6, 7)
# ``ru_maxrss`` counts kibibytes on Linux, and bytes on macOS.
_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024


def main() -> None:
    """Start the engine of the job on standard input, then run workloads until there are no more."""
    end_with(int(sys.argv[1]))
    send = take_over_stdout()
    engine = None
    try:
        engine = _start(json.loads(sys.stdin.readline()))
        send("started", facts=engine.facts())
        for line in sys.stdin:
            row = engine.run(Workload(**json.loads(line)), send)
            send("row", row=asdict(row))
    except Exception as error:
        send("failed", error=describe(error))
        raise
    finally:
        if engine is not None:
            engine.llm.llm_engine.engine_core.shutdown()


def _start(job: Mapping[str, Any]) -> _Engine:
    # By name: only the adapter may know vLLM, but the stock engine must be run with nothing of the adapter in it.
    vllm = importlib.import_module("vllm")
    arguments, policy = job["arguments"], job["policy"]
    if policy is None:
        llm = vllm.LLM(**arguments)
    else:
        from kvpolicy.adapters.vllm import LLM

        llm = LLM(**arguments, kv_cache_policy=policy)
    return _Engine(llm=llm, make_params=vllm.SamplingParams, extra_args=job["extra_args"])


@define(kw_only=True)
class _Engine:
    """A running engine; ``extra_args`` are those of every request's sampling parameters."""

    llm: Any
    make_params: Callable[..., Any]
    extra_args: dict[str, Any] | None
    _rested_s: float = field(factory=time.perf_counter)
    _rested_cpu_s: float = field(factory=time.process_time)

    def facts(self) -> dict[str, Any]:
        """Return what the engine says of itself."""
        config = self.llm.llm_engine.vllm_config
        return {
            "vllm": str(importlib.import_module("vllm").__version__),
            "scheduler": type(self._scheduler).__name__,
            "compilation_mode": str(config.compilation_config.mode),
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "num_gpu_blocks": config.cache_config.num_gpu_blocks,
            "num_threads": importlib.import_module("torch").get_num_threads(),
        }

    def run(self, workload: Workload, send: Send) -> RunRow:
        """Generate a workload's batches, and return what they gave.

        Raises:
            RuntimeError: a request ended before it should.
        """
        idle_s, idle_cpu_s = time.perf_counter() - self._rested_s, time.process_time() - self._rested_cpu_s
        watch = _Watch.of(self.llm, send)
        before, busy_before = self._totals(), _others_cpu_s()
        rng = random.Random(workload.seed)  # noqa: S311 - the same prompts for every engine
        wall_s = 0.0
        for _ in range(workload.repeats):
            prompts = self._prompts(workload, rng)
            started = time.perf_counter()
            self._generate(prompts, workload.new_tokens, watch)
            wall_s += time.perf_counter() - started
        after, busy_after = self._totals(), _others_cpu_s()
        row = summarise_steps(watch.steps, num_output_tokens=watch.num_tokens, wall_s=wall_s)
        self._rested_s, self._rested_cpu_s = time.perf_counter(), time.process_time()
        return evolve(
            row,
            **{name: after[name] - before[name] for name in after if name not in ("num_events", "num_preemptions")},
            peak_blocks=watch.peak_blocks,
            num_preemptions=watch.num_preemptions,
            peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT,
            idle_s=idle_s,
            idle_cpu_s=idle_cpu_s,
            other_cpu_s=None if busy_before is None or busy_after is None else busy_after - busy_before,
        )

    @property
    def _scheduler(self) -> Any:  # noqa: ANN401 - vLLM's
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def _totals(self) -> dict[str, Any]:
        """Return the counters of our engine that a row has, too; none of the stock one."""
        totals = getattr(self.llm, "compaction_totals", None)
        if totals is None:
            return {}
        values: dict[str, Any] = asdict(totals)
        return {name: value for name, value in values.items() if name in RunRow.__annotations__}

    def _prompts(self, workload: Workload, rng: random.Random) -> list[dict[str, list[int]]]:
        vocabulary = range(3, self.llm.llm_engine.model_config.get_vocab_size())
        return [
            {"prompt_token_ids": rng.choices(vocabulary, k=workload.prompt_tokens)}
            for _ in range(workload.num_requests)
        ]

    def _generate(self, prompts: list[dict[str, list[int]]], new_tokens: int, watch: _Watch) -> None:
        """Do what ``LLM.generate`` does, step by step."""
        params = self.make_params(
            temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, extra_args=self.extra_args
        )
        self.llm.enqueue(prompts, params, use_tqdm=False)
        watch.follow(list(self._scheduler.requests.values()))
        engine = self.llm.llm_engine
        while engine.has_unfinished_requests():
            for output in watch.step(engine.step):
                if len(output.outputs[0].token_ids) != new_tokens:
                    got = f"{len(output.outputs[0].token_ids)} ({output.outputs[0].finish_reason})"
                    message = f"request {output.request_id}: expected {new_tokens} tokens, got {got}"
                    raise RuntimeError(message)
        watch.end_batch()


@define(kw_only=True)
class _Watch:
    """Looks at the requests and the pool between steps; nothing of the engine is changed."""

    llm: Any
    pool: Any
    send: Send
    steps: list[Step] = field(factory=list)
    num_tokens: int = 0
    num_preemptions: int = 0
    peak_blocks: int = 0
    _requests: list[Any] = field(factory=list)
    _beat_s: float = field(factory=time.perf_counter)

    @classmethod
    def of(cls, llm: Any, send: Send) -> _Watch:  # noqa: ANN401 - vLLM's
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        return cls(llm=llm, pool=scheduler.kv_cache_manager.block_pool, send=send)

    def follow(self, requests: list[Any]) -> None:
        """Watch these requests from now on."""
        self._requests = requests

    def step(self, step: Callable[[], Any]) -> Any:  # noqa: ANN401 - vLLM's
        """Run one step and return its outputs."""
        before, events_before = self._computed(), self._num_events()
        started = time.perf_counter()
        outputs = step()
        ended = time.perf_counter()
        self.steps.append(
            Step(
                duration_s=ended - started,
                num_tokens=decoded_tokens(before, self._computed()),
                num_events=self._num_events() - events_before,
            )
        )
        # One block is vLLM's null block.
        self.peak_blocks = max(self.peak_blocks, self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks())
        if ended - self._beat_s > _BEAT_S:
            self._beat_s = ended
            done = sum(request.num_output_tokens for request in self._requests)
            self.send("progress", num_tokens=self.num_tokens + done)
        return outputs

    def end_batch(self) -> None:
        """Count what the requests, which have all ended, came to."""
        self.num_tokens += sum(request.num_output_tokens for request in self._requests)
        self.num_preemptions += sum(request.num_preemptions for request in self._requests)

    def _computed(self) -> list[int]:
        return [request.num_computed_tokens for request in self._requests]

    def _num_events(self) -> int:
        totals = getattr(self.llm, "compaction_totals", None)
        return 0 if totals is None else int(totals.num_events)


def _others_cpu_s() -> float | None:
    """Return the time that processors have spent on anything but this process; Linux keeps it in a file only."""
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:]]
    except OSError:
        return None
    return sum(ticks[i] for i in _BUSY) / os.sysconf("SC_CLK_TCK") - time.process_time()


if __name__ == "__main__":
    # Whatever the caller's environment says: steps can only be seen from inside.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main()
