"""Interface of environments: tools, games or simulated users that answer the model's turns.

A user subclasses ``Environment`` (``from bapo_megatron.environment import Environment``): ``step`` takes the
text of a model turn and returns a ``Reply``. With an environment, a response is an *episode*: turns that the
model samples, alternating with the environment's observations. User classes run in environment workers
(worker.py). Imports only the standard library: a worker may have a separate interpreter without numpy.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

Resume = Literal["replay", "restore", "never"]
"""How a new object replaces a lost one; see ``Environment.resume``."""

Role = Literal["tool", "user"]

PROMPT_TOOLS = "prompt_tools"
"""Field of a row's `extra_info`: tool schemas that the chat template writes into the prompt after those of
the environment class. Written by ``adapters/agent_rows.py``."""


@dataclass(frozen=True)
class Task:
    """Constructor argument of an ``Environment``: a dataset row's fields, and the episode's unique name."""

    messages: list[dict[str, Any]]
    """Chat messages of the prompt, with role and content."""
    ground_truth: str = ""
    data_source: str = ""
    extra_info: dict[str, Any] = field(default_factory=dict)
    episode: str = ""
    """Episode name, unique in a run and stable across restarts: an idempotency key for external effects."""


class SampledToken(NamedTuple):
    """A token that the model sampled: id, text, log-prob in nats."""

    id: int
    text: str
    log_prob: float


class SampledTurn(str):
    """A model turn: its text, as a ``str``. With ``Environment.wants_tokens`` it also has ``tokens``, and
    ``prompt_tokens``, the number of tokens before the turn; otherwise these are empty and 0."""

    prompt_tokens = 0
    tokens: Sequence[SampledToken] = ()

    @staticmethod
    def of(text: str, prompt_tokens: int = 0, tokens: Iterable[Sequence[Any]] = ()) -> SampledTurn:
        """Return the turn; the arguments are the items of ``as_json``."""
        made = SampledTurn(text)
        made.prompt_tokens, made.tokens = prompt_tokens, [SampledToken(*token) for token in tokens]
        return made

    @staticmethod
    def as_json(text: str) -> list[Any]:
        """Return the arguments of ``of`` for a turn or plain text, as JSON values."""
        return [text, *((text.prompt_tokens, text.tokens) if isinstance(text, SampledTurn) else ())]


class Turn(NamedTuple):
    """A turn of an episode in the run's journal: sampled by the model, or the environment's observation."""

    kind: Literal["sampled", "given"]
    text: str
    """A sampled turn (possibly a ``SampledTurn``) without its end token, or an observation as given."""


@dataclass(frozen=True)
class Context:
    """Whole conversation (messages, tools) that the model answers next, in place of the episode so far."""

    messages: Sequence[Mapping[str, Any]]
    """Chat messages. ``{"role": "assistant", "turn": 3}`` is the model's third turn, as sampled."""
    after: int = 0
    """Last turn up to which the messages repeat an earlier conversation, counted from 1; 0: none."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """Tool schemas that the chat template writes into the conversation; None: those of the class."""


@dataclass(frozen=True)
class Reply:
    """An environment's answer to a turn: observation (None at the end), reward, metrics, note, context."""

    observation: str | Sequence[str] | None
    """Next input of the model, with mask 0 in training. Several texts (results of its calls) become one
    message each if the chat template allows, else lines of one message. None ends the episode."""
    reward: float | None = None
    """Rewards of an episode add up. If all replies have None, ``reward.function`` judges the last turn."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Step metrics by name; each is averaged over the episodes that report it."""
    note: Any = None
    """Plain JSON of at most 64 KiB and 100 levels for the journal; ``restore`` gets the last one not None."""
    context: Context | None = None
    """Conversation that the model answers next, if that does not continue the last turn: a branch of the
    episode. ``observation`` is then text that identifies the question without the turns before it."""

    @property
    def text(self) -> str | None:
        """Observation as in the journal: several texts become lines. Raises TypeError for other types."""
        said = self.observation
        if said is None or isinstance(said, str):
            return said
        if isinstance(said, (list, tuple)) and all(isinstance(text, str) for text in said):
            return "\n".join(said)
        raise TypeError(f"Reply.observation is {type(said).__name__}: give a text, a list of texts or None")


class Environment:
    """Base class of a user's environment: define ``step``. An object is one episode, in a worker process. If
    it is lost with its worker or the run, a new object gets to its state from the episode's turns, which the
    run's journal keeps, in the way that ``resume`` says."""

    role: ClassVar[Role] = "tool"
    stops: ClassVar[tuple[str, ...]] = ()
    """Single-token texts that end a turn, besides the model's stop tokens."""
    tools: ClassVar[tuple[Mapping[str, Any], ...]] = ()
    """Tool schemas, as ``{"type": "function", "function": {"name": "add", "parameters": {}}}``, which the
    chat template writes into each prompt. Empty: the prompt text describes the tools."""
    resume: ClassVar[Resume] = "replay"
    """`replay`: repeats ``step`` with each recorded turn, which must give the recorded answer. `restore`:
    calls ``restore`` with the turns and the last note. `never`: the response starts over."""
    wants_tokens: ClassVar[bool] = False
    """Whether the turns that ``step`` gets carry tokens with log-probs (``SampledTurn``)."""
    settings_type: ClassVar[type | None] = None
    """Dataclass in ``environment/settings.py`` for a check of the settings before a run. Not inherited by a
    subclass that defines ``__init__``, ``play`` or ``run``. None: no check."""
    logs_dir: ClassVar[str | None] = None
    """Run folder for program logs, set by the worker; None: no logs."""
    own_random: ClassVar[bool] = False
    """Whether it draws from the global generators of ``random`` or numpy. Each episode then has its own
    states, and a worker runs one step at a time, so that a replay repeats the draws."""

    def __init__(self, task: Task, settings: Mapping[str, Any]) -> None:
        """``settings``: `environment.settings`, a JSON object. An error fails the response, not the run."""
        self.task = task
        self.settings = settings

    def step(self, turn: str) -> Reply | Awaitable[Reply]:
        """Answer a model turn. If ``async``, one worker can hold thousands of waiting episodes."""
        raise NotImplementedError

    def again(self, turn: str, given: str) -> Reply | Awaitable[Reply]:
        """Repeat ``step`` in a replay. ``given``: the recorded observation, which the reply must match."""
        return self.step(turn)

    def restore(self, turns: Sequence[Turn], note: Any) -> None:
        """Restore the state after ``turns``, which end with an observation. ``note``: the last note."""
        raise NotImplementedError

    def close(self) -> None:
        """Release the episode's resources. Called at its end, even after an error, but not after a kill."""


def unjudged(_prompt: Any, _response: str) -> float:
    """Return reward 0. For ``reward.function`` if the environment gives all rewards and rows have no answer:
    only called for a response whose environment gave none, because it was cut off or never started."""
    return 0.0
