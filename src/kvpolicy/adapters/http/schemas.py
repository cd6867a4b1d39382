"""What the routes take and answer, as pydantic models: the OpenAPI schema is made of these."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

_MAX_INDEX = 2**53 - 1
FrameIndex = Annotated[
    int,
    Field(
        ge=0,
        le=_MAX_INDEX,
        description="The client's number of this chunk: 0 for the first one, then one more per answered chunk. "
        "With it a push can be repeated safely after a broken connection.",
    ),
]


class _Body(BaseModel):
    """A JSON body of a request: unknown fields and wrong types are answered with 422."""

    model_config = ConfigDict(extra="forbid", strict=True)


class _Options(BaseModel):
    """Named options that the engine checks: those that are not listed here are passed on, and it names the unknown."""

    model_config = ConfigDict(extra="allow", strict=True)

    def given(self) -> dict[str, Any]:
        """Return the options that the client has set."""
        return self.model_dump(exclude_unset=True)


class SamplingOptions(_Options):
    """Fields of vLLM's `SamplingParams`. Those left out have the session's values, or the server's defaults."""

    max_tokens: int | None = Field(default=None, description="Longest reply, in tokens.", examples=[24])
    temperature: float | None = Field(default=None, description="0 always takes the likeliest token.", examples=[0.3])
    top_p: float | None = Field(default=None, examples=[0.9])
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = Field(default=None, description="The same seed gives the same reply to the same session.")
    repetition_penalty: float | None = Field(default=None, examples=[1.1])
    frequency_penalty: float | None = Field(default=None, examples=[0.0])
    presence_penalty: float | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = Field(
        default=None, description="Tokens that end a reply."
    )


class RetentionOptions(_Options):
    """What a session keeps of its past; what is left out has its default. The oldest goes first."""

    content_segments: int | None = Field(default=None, description="Chunks kept, the newest included.", examples=[30])
    text_tokens: int | None = Field(default=None, description="Tokens kept in chunks and replies without images.")
    total_tokens: int | None = Field(
        default=None, description="Tokens kept in all, the next reply included.", examples=[2048]
    )
    anchor_tokens: int | None = Field(
        default=None, description="Tokens of the first chunk that are never evicted; left out: the whole first chunk."
    )
    consolidation_threshold: float | None = Field(
        default=None,
        description="Share of the model's trained positions after which the kept window is computed anew.",
        examples=[0.7],
    )
    min_total_tokens: int | None = Field(default=None, description="What `total_tokens` may not be below.")


class OpenRequest(_Body):
    """A session to be opened. Everything has a default: `{}` will do."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "system_prompt": "You describe what changes from frame to frame, in one short sentence.",
                    "retention": {"total_tokens": 2048, "content_segments": 30},
                    "sampling": {"max_tokens": 24, "temperature": 0.0},
                }
            ]
        }
    )

    model: str | None = Field(
        default=None, description="If given, it must be a name of the model that this server serves."
    )
    system_prompt: str | None = Field(
        default=None, description="Comes before the first chunk and is kept for the whole life of the session."
    )
    retention: RetentionOptions | None = Field(
        default_factory=RetentionOptions,
        description="Budgets. null: nothing is ever evicted, and the session ends when the context is full.",
    )
    sampling: SamplingOptions = Field(default_factory=SamplingOptions)
    priority: int = Field(
        default=0, ge=-(2**31), le=2**31 - 1, description="As in vLLM: a smaller number is more important."
    )


class NoQuery(BaseModel):
    """The query of a route that takes none."""

    model_config = ConfigDict(extra="forbid")


class PushQuery(BaseModel):
    """The query of a push."""

    model_config = ConfigDict(extra="forbid")

    frame_index: FrameIndex | None = None
    stream: bool = Field(default=False, description="Answer with server-sent events.")


class OpenReply(BaseModel):
    """An open session. Whoever knows the id can use it: keep it like a password."""

    session_id: str = Field(examples=["0rAV1dKGMgSzQkWfCq1LJQsK6nW9xBbE"])
    model: str
    max_blocks: int = Field(description="The most KV blocks that it can ever hold: its share in the admission sum.")
    retention: dict[str, Any] | None = Field(description="The budgets in force; null: none.")
    sampling: dict[str, Any] = Field(description="The sampling parameters of chunks that bring none.")


class FrameTurn(_Body):
    """One chunk of text."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"text": "What has changed?", "frame_index": 0}]})

    text: str = Field(min_length=1)
    frame_index: FrameIndex | None = None
    sampling: SamplingOptions | None = Field(default=None, description="For this chunk, over the session's own.")
    stream: bool = Field(default=False, description="Answer with server-sent events while the reply is made.")


class FrameReply(BaseModel):
    """The reply to one chunk."""

    session_id: str
    frame_index: int
    text: str
    finish_reason: str = Field(description='"stop", or "length" where `max_tokens` ended the reply.')
    stop_reason: int | str | None = Field(description="Token id or kvpolicy code that ended it, if one did.")
    chunk_tokens: int = Field(description="Length of the chunk, in tokens.")
    reply_tokens: int
    ttft_s: float = Field(description="From handing the chunk to the engine to the first token of the reply.")
    latency_s: float = Field(description="From handing the chunk to the engine to the end of the reply.")
    num_evicted_tokens: int = Field(description="Tokens that this chunk pushed out.")
    resident_tokens: int = Field(description="Tokens that the session holds now.")
    blocks: int = Field(description="KV blocks that it holds now.")
    consolidated: bool = Field(description="Whether the kept window was computed anew since the reply before.")


class SegmentBody(BaseModel):
    """One stretch of what a session remembers."""

    kind: Literal["anchor", "content", "reply"] | str  # noqa: PYI051 - the schema should name the usual ones
    tokens: int


class StatusReply(BaseModel):
    """A session as of its last reply."""

    session_id: str
    state: Literal["idle", "pending", "ended"]
    reason: str | None = Field(description="Why it has ended; null while it has not.")
    frames: int = Field(description="Chunks that were answered: also the index of the next one.")
    refused: int = Field(description="Chunks that were not taken in. They have no index.")
    reply_tokens: int
    resident_tokens: int
    blocks: int
    max_blocks: int
    num_evictions: int
    num_evicted_tokens: int
    num_consolidations: int
    num_parks: int = Field(description="How often its blocks were lent to others while it was idle.")
    segments: list[SegmentBody] = Field(description="What it holds, oldest first.")
    age_s: float
    idle_s: float = Field(description="Time since it was last used; 0 while a chunk is pending.")


class CloseReply(BaseModel):
    """A closed session. Closing it once more gives the same answer for as long as it is remembered."""

    session_id: str
    frames: int
    closed: bool = Field(
        description="Whether the engine has let go of it. false: it was told to, and is late; the place of the "
        "session stays taken until it has."
    )


class ConfigReply(BaseModel):
    """What this server serves, and its limits."""

    model: str
    takes_images: bool
    engine: dict[str, int] = Field(description="Context limit, trained range, block size and blocks of the engine.")
    limits: dict[str, float | int] = Field(description="Sessions, bytes, pixels, deadlines and timeouts.")
    sampling: dict[str, Any] = Field(description="Sampling parameters of sessions that name none.")
    sampling_fields: list[str] = Field(description="Names of all sampling parameters that a request may bring.")
    retention: dict[str, Any] = Field(description="Budgets of sessions that name none.")


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str = Field(description="For people.", examples=["frame: a chunk of this session is pending"])
    type: str = Field(description="Who acts next: the class of the error.", examples=["ConflictError"])
    code: str = Field(description="For programs.", examples=["frame_pending"])
    reasons: list[str] = Field(description="Every reason that was found, one sentence each.")


class ErrorBody(BaseModel):
    """The shape of every error."""

    error: ErrorDetail
