"""What is measured: engines, flags, and cases with the figures that they are to reach."""

from __future__ import annotations

from enum import Enum
from math import ceil
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from kvpolicy.core.errors import PolicyUsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

# More than any pool of these cases takes; how much is taken follows from the number of blocks.
_MOST_CACHE_BYTES = 4 << 30
_LIMIT_NEW_TOKENS = 32
# The limit is a second of decoding: several are less noisy than one.
_LIMIT_REPEATS = 3
_WARM_UP_TOKENS = 32
_BOTH = "both"


class Kind(Enum):
    """What runs: vLLM's own engine, ours with a policy, or a stand-in for the best that a policy can reach."""

    STOCK = "stock"
    LIMIT = "limit"
    """The stock engine at the length that a policy holds: no policy can be faster."""
    HEAD = "randkv-head"
    SHARED = "randkv-shared"
    BLOCK = "randkv-block"
    SINK_WINDOW = "sink-window"
    OFF = "off"
    """A policy is installed, and every request turns it off."""

    @property
    def is_ours(self) -> bool:
        """Whether kvpolicy's engine runs."""
        return self not in (Kind.STOCK, Kind.LIMIT)


POLICIES = (Kind.HEAD, Kind.SHARED, Kind.BLOCK, Kind.SINK_WINDOW)
_GRANULARITY = {Kind.HEAD: "head", Kind.SHARED: "shared", Kind.BLOCK: "block", Kind.OFF: "head"}


class Flags(Enum):
    """Flags of both engines."""

    EAGER = "eager"
    """No compilation, no prefix caching: the flags of the first tries."""
    PRODUCTION = "production"
    """Compiled as vLLM does by default, with prefix caching."""

    def engine_arguments(self) -> dict[str, Any]:
        """Return the arguments that these flags are."""
        is_eager = self is Flags.EAGER
        return {"enforce_eager": is_eager, "enable_prefix_caching": not is_eager}


class Model(Enum):
    """A model that the benchmark can make."""

    KV_HEAVY = "kv-heavy"
    SMOLLM = "smollm"


class Figure(Enum):
    """A figure that a case can be judged by."""

    OF_STOCK = "x stock"
    OF_LIMIT = "of the limit"


@frozen
class Target:
    """The least that a figure is to be."""

    figure: Figure
    at_least: float


@frozen(kw_only=True)
class Workload:
    """One batch: prompts of random tokens, drawn from the seed, and so many new tokens for each.

    ``repeats``: the batch is generated so many times, one after the other, each with prompts of its own.
    """

    seed: str
    num_requests: int
    prompt_tokens: int
    new_tokens: int
    repeats: int = 1

    @property
    def num_new_tokens(self) -> int:
        """New tokens of all requests."""
        return self.num_requests * self.new_tokens * self.repeats


@frozen(kw_only=True)
class Case:
    """One comparison.

    ``num_blocks`` None: a pool in which every dense request fits at once. ``repeats``: batches in one turn; where a
    batch is short and the target is close to 1, several of them even out what else happens on the machine.
    """

    name: str
    shows: str
    num_requests: int = 8
    new_tokens: int
    quick_tokens: int
    prompt_tokens: int = 64
    repeats: int = 1
    model: Model = Model.KV_HEAVY
    kinds: tuple[Kind, ...] = POLICIES
    has_limit: bool = True
    num_blocks: int | None = None
    budget: int = 256
    buffer_size: int = 64
    block_size: int = 32
    targets: tuple[Target, ...] = ()
    allows_preemptions: bool = True
    is_quick: bool = field(default=False)

    @property
    def asked_tokens(self) -> int:
        """New tokens for each request, in the size that is run."""
        return self.quick_tokens if self.is_quick else self.new_tokens

    @property
    def limit_length(self) -> int:
        """Prompt of the limit: with half its new tokens, the mean length that a policy holds between events."""
        return self.budget + 3 * self.buffer_size // 2 - _LIMIT_NEW_TOKENS // 2

    @property
    def context(self) -> int:
        """The longest request, in tokens."""
        lengths = [self.prompt_tokens + self.asked_tokens]
        if self.has_limit:
            lengths.append(self.limit_length + _LIMIT_NEW_TOKENS)
        return max(lengths)

    @property
    def pool(self) -> int:
        """Blocks of the pool; one of them is vLLM's null block."""
        return self.num_blocks or self.num_requests * ceil(self.context / self.block_size) + 1

    def workload(self, kind: Kind, pair: int) -> Workload:
        """Return what one engine does in one pair: in a pair, the prompts of all engines are the same."""
        is_limit = kind is Kind.LIMIT
        return Workload(
            seed=f"{self.name}/{'limit' if is_limit else 'prompts'}/{pair}",
            num_requests=self.num_requests,
            prompt_tokens=self.limit_length if is_limit else self.prompt_tokens,
            new_tokens=_LIMIT_NEW_TOKENS if is_limit else self.asked_tokens,
            repeats=_LIMIT_REPEATS if is_limit else self.repeats,
        )

    def warm_up(self) -> Workload:
        """Return what every engine does once before anything is measured."""
        return Workload(
            seed=f"{self.name}/warm-up",
            num_requests=self.num_requests,
            prompt_tokens=self.prompt_tokens,
            new_tokens=min(_WARM_UP_TOKENS, self.asked_tokens),
        )

    def policy(self, kind: Kind) -> dict[str, Any] | None:
        """Return the engine's ``kv_cache_policy``; None for vLLM's own engine."""
        if not kind.is_ours:
            return None
        sizes = {"budget": self.budget, "buffer_size": self.buffer_size}
        if kind is Kind.SINK_WINDOW:
            return {"type": "sink_window", **sizes}
        return {"type": "randkv", "granularity": _GRANULARITY[kind], **sizes}

    def engine_arguments(self, model: str, flags: Flags) -> dict[str, Any]:
        """Return vLLM's engine arguments, the same for every engine of the case."""
        return {
            "model": model,
            "dtype": "bfloat16",
            # Token ids in, token ids out: text is made alike by both, and is not what is measured.
            "skip_tokenizer_init": True,
            "max_model_len": self.context,
            "block_size": self.block_size,
            "max_num_seqs": self.num_requests,
            "num_gpu_blocks_override": self.pool,
            "kv_cache_memory_bytes": _MOST_CACHE_BYTES,
            "async_scheduling": False,
            "disable_log_stats": True,
            "seed": 0,
            **flags.engine_arguments(),
        }


CASES = (
    Case(
        name="long-3000",
        shows="long generations, a pool in which all of them fit",
        new_tokens=3000,
        quick_tokens=600,
        targets=(Target(Figure.OF_LIMIT, 0.97),),
    ),
    Case(
        name="long-8000",
        shows="longer ones: dense attention costs ever more",
        new_tokens=8000,
        quick_tokens=1000,
        targets=(Target(Figure.OF_LIMIT, 0.95), Target(Figure.OF_STOCK, 3.7)),
    ),
    Case(
        name="tight-pool",
        shows="a pool in which two dense requests fit",
        new_tokens=2000,
        quick_tokens=1000,
        num_blocks=129,
        targets=(Target(Figure.OF_STOCK, 3.0),),
        allows_preemptions=False,
    ),
    Case(
        name="short",
        shows="short generations: no event is ever due",
        new_tokens=200,
        quick_tokens=64,
        repeats=4,
        has_limit=False,
        targets=(Target(Figure.OF_STOCK, 0.98),),
    ),
    Case(
        name="off",
        shows="a policy is installed, and every request turns it off",
        new_tokens=600,
        quick_tokens=200,
        repeats=2,
        kinds=(Kind.OFF,),
        has_limit=False,
        targets=(Target(Figure.OF_STOCK, 0.99),),
    ),
    Case(
        name="smollm",
        shows="SmolLM2-135M, whose weights cost more than its cache",
        num_requests=4,
        new_tokens=700,
        quick_tokens=400,
        model=Model.SMOLLM,
    ),
)


def find_cases(names: Iterable[str]) -> tuple[Case, ...]:
    """Return the cases of these names, in the order of ``CASES``; all of them if there are no names.

    Raises:
        PolicyUsageError: an unknown name.
    """
    asked = _known("--case", names, [case.name for case in CASES])
    return tuple(case for case in CASES if not asked or case.name in asked)


def find_policies(names: Iterable[str]) -> tuple[Kind, ...]:
    """Return the policies of these names; all of them if there are no names.

    Raises:
        PolicyUsageError: an unknown name.
    """
    asked = _known("--policies", names, [kind.value for kind in POLICIES])
    return tuple(kind for kind in POLICIES if not asked or kind.value in asked)


def find_flags(name: str) -> tuple[Flags, ...]:
    """Return the flags of this name.

    Raises:
        PolicyUsageError: an unknown name.
    """
    _known("--flags", [name], [*(flags.value for flags in Flags), _BOTH])
    return tuple(flags for flags in Flags if name in (flags.value, _BOTH))


def _known(option: str, names: Iterable[str], known: list[str]) -> list[str]:
    asked = list(names)
    wrong = [f"{option}: unknown name {name!r}; known names: {', '.join(known)}" for name in asked if name not in known]
    if wrong:
        raise PolicyUsageError(wrong)
    return asked
