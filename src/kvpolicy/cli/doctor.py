"""``kvpolicy doctor``: what works here, as tables; what is missing is a reason, not a traceback."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvpolicy.adapters.vllm.shared.diagnosis import Diagnosis, Fact, Verdict
from kvpolicy.core.errors import EngineContractError
from kvpolicy.serving import diagnose

if TYPE_CHECKING:
    from collections.abc import Sequence

_GOOD, _BAD = "[green]yes[/]", "[red]no[/]"

HELP = """\
usage: kvpolicy doctor [MODEL] [any flag of 'kvpolicy serve']

Says what the installed engine, and a model in it, support: bounded sessions (A) and policies (B), every reason
at once. Configurations are read and a tiny tensor is written; no model is loaded.

Exit status: 0 if what the flags turn on (--enable-streaming, --kv-cache-policy; both, if neither is given) would
work, else 1.

  kvpolicy doctor
  kvpolicy doctor Qwen/Qwen3-4B --enable-streaming --max-model-len 32768
"""


def run_doctor(arguments: Sequence[str], console: Console | None = None) -> int:
    """Print the diagnosis; return the exit status: 0 if everything that was asked for would work."""
    console = console or Console()
    if {"-h", "--help"} & set(arguments):
        console.print(HELP, markup=False, highlight=False, end="")
        return 0
    diagnosis = _diagnosis(arguments)
    show(diagnosis, console)
    return 0 if diagnosis.is_good else 1


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Print a diagnosis: what was found, then each verdict with all of its reasons."""
    if diagnosis.facts:
        facts = Table("what", "found", title="Engine and model", title_justify="left")
        for fact in diagnosis.facts:
            facts.add_row(fact.name, escape(fact.found), style=None if fact.is_good else "red")
        console.print(facts)
    verdicts = Table("what", "works", "why not", title="What is supported", title_justify="left", show_lines=True)
    for verdict in diagnosis.verdicts:
        reasons = "\n".join(f"- {reason}" for reason in verdict.reasons)
        verdicts.add_row(escape(verdict.name), _BAD if verdict.reasons else _GOOD, escape(reasons))
    console.print(verdicts)


def _diagnosis(arguments: Sequence[str]) -> Diagnosis:
    # Its messages would stand between the tables; read when vLLM is imported, and what it refuses is shown below.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        return diagnose(arguments)
    # No vLLM, one for which there is no adapter, or one that does not fit the machine.
    except (ImportError, EngineContractError) as error:
        return _nothing(str(error))


def _nothing(reason: str) -> Diagnosis:
    """Return the diagnosis where nothing can work."""
    return Diagnosis(
        facts=(Fact("vLLM", "not usable, see below", is_good=False),),
        verdicts=tuple(
            Verdict(name=what, is_asked_for=True, reasons=(reason,)) for what in ("A: bounded sessions", "B: policies")
        ),
    )
