"""Environments: what answers the turns of a model, a tool, a game or a user.

The interface: the class that a user subclasses, and the data that goes in and out; ``from
bapo_megatron.environment import Environment`` is the import of users' files. With an environment a response
is an *episode*: turns that the model samples, and between them observations that it is given. Only the
standard library is imported: an environment may run in an interpreter of its own, which has neither numpy nor
torch.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

Resume = Literal["replay", "restore", "never"]
"""How a new object comes to where a lost one was; see ``Environment.resume``."""


PROMPT_TOOLS = "prompt_tools"
"""Field of a row's `extra_info`: schemas of tools that the chat template writes into its prompt, behind those
of its environment's class. ``adapters/agent_rows.py`` writes it."""


@dataclass(frozen=True)
class Task:
    """What an environment knows of its episode: a row of the dataset, as plain data."""

    messages: list[dict[str, Any]]
    """The chat messages of the prompt, role and content."""
    ground_truth: str = ""
    data_source: str = ""
    extra_info: dict[str, Any] = field(default_factory=dict)
    episode: str = ""
    """Name of the episode, unique in a run, the same after a kill: an idempotency key for outer effects."""


class SampledToken(NamedTuple):
    """A token that the model has sampled."""

    id: int
    text: str
    log_prob: float


class SampledTurn(str):
    """The text of a turn of the model, with its tokens and the number of those before it where
    ``Environment.wants_tokens`` is set."""

    prompt_tokens = 0
    tokens: Sequence[SampledToken] = ()

    @staticmethod
    def of(text: str, prompt_tokens: int = 0, tokens: Iterable[Sequence[Any]] = ()) -> SampledTurn:
        """From what ``as_json`` has made."""
        made = SampledTurn(text)
        made.prompt_tokens, made.tokens = prompt_tokens, [SampledToken(*token) for token in tokens]
        return made

    @staticmethod
    def as_json(text: str) -> list[Any]:
        """The arguments of ``of``, as JSON has them; also of a text alone."""
        return [text, *((text.prompt_tokens, text.tokens) if isinstance(text, SampledTurn) else ())]


class Turn(NamedTuple):
    """One turn of an episode so far, as the journal has it."""

    kind: Literal["sampled", "given"]
    text: str
    """A sampled turn, which may be a ``SampledTurn``, without the token that ended it; a given one as the
    environment said it."""


@dataclass(frozen=True)
class Context:
    """A whole conversation that the model continues with."""

    messages: Sequence[Mapping[str, Any]]
    """Chat messages. ``{"role": "assistant", "turn": 3}`` is the model's third turn, as it was sampled."""
    after: int = 0
    """The last turn up to which they repeat an earlier conversation, counted from 1; 0: none."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """Schemas of tools, which the chat template writes into it; None: those of the class."""


@dataclass(frozen=True)
class Reply:
    """Answer of an environment to a turn of the model."""

    observation: str | Sequence[str] | None
    """What the model is given next, with mask 0 in training; of several texts, results of its calls, each is
    a message where the chat template takes that, else a line. None: the episode is over."""
    reward: float | None = None
    """Rewards of an episode add up. None in all its replies: ``reward.function`` judges the last turn."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers for the step's metrics, by name; each is averaged over the episodes that report it."""
    note: Any = None
    """Plain JSON of at most 64 KiB and 100 levels, kept in the journal for ``restore``, which gets the last
    that is not None."""
    context: Context | None = None
    """What the model answers next, where that is not its last turn and the observation: a branch of the
    episode. ``observation`` is then a text that says which question it is, without the turns before it."""

    @property
    def text(self) -> str | None:
        """The observation as the journal has it: of several texts, each is a line. TypeError for others."""
        said = self.observation
        if said is None or isinstance(said, str):
            return said
        if isinstance(said, (list, tuple)) and all(isinstance(text, str) for text in said):
            return "\n".join(said)
        raise TypeError(f"Reply.observation is {type(said).__name__}: give a text, a list of texts or None")


class Environment:
    """One episode. Made by a worker of environments for each response of ``environment.function``.

    The object is a cache of its episode's turns. When its worker is gone, or the run was killed, a new object
    is brought to the same place from the turns in the journal, in the way that ``resume`` says.
    """

    role: ClassVar[Literal["tool", "user"]] = "tool"
    """Chat role of its observations."""
    stops: ClassVar[tuple[str, ...]] = ()
    """Texts of one token each that end a turn, besides the stop tokens of the model."""
    tools: ClassVar[tuple[Mapping[str, Any], ...]] = ()
    """Schemas of its tools, as ``{"type": "function", "function": {"name": "add", "parameters": {}}}``, which
    the model's chat template writes into each prompt. Empty: the prompts say themselves what there is."""
    resume: ClassVar[Resume] = "replay"
    """`replay`: ``step`` is called again with each recorded turn, and must answer what it had answered.
    `restore`: ``restore`` gets the turns and the last note; nothing is done twice but a step that was
    interrupted. `never`: the response begins again."""
    wants_tokens: ClassVar[bool] = False
    """Whether the turns that ``step`` gets have their tokens, with log-probs (``SampledTurn``)."""
    settings_type: ClassVar[type | None] = None
    """Dataclass of ``environment/settings.py`` that the settings must fit, checked before a run; a subclass
    inherits it, if it has no ``__init__``, ``play`` or ``run`` of its own. None: they come as given."""
    logs_dir: ClassVar[str | None] = None
    """Folder of the run for logs of its programs; the worker sets it. None: there is none."""
    own_random: ClassVar[bool] = False
    """Whether it draws from the global generators of ``random`` or numpy. Then each episode has states of its
    own, and one step at a time runs in a worker: another episode's draws would make a replay diverge."""

    def __init__(self, task: Task, settings: Mapping[str, Any]) -> None:
        """``settings``: the object of ``environment.settings``. An error fails the response, not the run."""
        self.task = task
        self.settings = settings

    def step(self, turn: str) -> Reply | Awaitable[Reply]:
        """Answer a turn of the model. It may be ``async``: thousands then wait in one worker."""
        raise NotImplementedError

    def again(self, turn: str, given: str) -> Reply | Awaitable[Reply]:
        """``step`` in a replay. ``given``: the observation in the journal, which the reply must have."""
        return self.step(turn)

    def restore(self, turns: Sequence[Turn], note: Any) -> None:
        """Go to where the episode was after ``turns``, the last of which is given. ``note``: the last one."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what the episode holds. Called at its end, also after an error; not after a kill."""


def unjudged(_prompt: Any, _response: str) -> float:
    """Reward 0 of a response whose environment gave none: cut before its end, or never begun.

    For ``reward.function``, where the environment gives all rewards and rows have no answer.
    """
    return 0.0
