"""The sentences of a study's document that no run changes."""

from bapo_megatron.study.measures import COLLAPSE_SHARE, ENTROPY_SHARE, SPIKE_FACTOR, SPIKE_WINDOW

METHOD = """\
## What was run

Runs of one recipe, under several methods, at several degrees of staleness. Every arm is an ordinary
`bapo train` run; `study.json` in the study's folder has all commands. Methods share seeds, so they meet
the same prompts in the same order and the same first batch. On-policy no ratio leaves 1 and no bound
clips, so GRPO's run stands for all methods that differ by their bounds alone. `fresh_matched` cuts each
batch into smaller steps until it makes as many updates as `stale_7`, each of as many responses but fresh
ones: it tells staleness from the mere number of updates."""

VERDICTS = """\
Each claim is one difference between two arms, paired by seed; several settings are averaged within a
seed first. The interval is Student's, at 95 %. **Seen**: it lies on the claimed side of 0 and reaches
what matters. **Opposite**: the same on the other side. **Not seen**: whatever is there is smaller than
what matters. **Not distinguishable**: nothing and an effect that matters are both within the interval;
more seeds would tell. **Not tried**: no seed has both arms. With so many claims, one or two verdicts may
be luck."""

DEFINITIONS = f"""\
- Final values are means over the last tenth of the steps (1 to 5 of them), the entropy at the start is
  that of the first pass over the first batch; ± is the standard deviation over seeds. Lines in the
  pictures are means over seeds, shades reach from the least to the largest.
- In `partial` the first steps train on the few groups that are finished: their reward and entropy are not
  comparable to the first of other settings.
- *Held-out*: share of the evaluation problems that the last weights answer rightly.
- *Deepest fall*: how far the running mean of the reward falls below its best so far.
- *Collapse*: the reward ends below {COLLAPSE_SHARE:g} of its best running mean. *Entropy collapse*: the
  entropy ends below {ENTROPY_SHARE:g} of what it was at the start.
- *Spike*: an update whose gradient norm, before it is clipped, is above {SPIKE_FACTOR:g} times the
  median of the {SPIKE_WINDOW} updates before it.
- *Positive contribution*: P / (P + N) over the tokens that have a gradient, the same reading for all
  methods.
- *Clipped tokens*: share of tokens whose gradient the bounds take away, mean of the run.
- *Bounds moved*: share of the updates for which the search left its first bounds. Where positive tokens
  reach the target from the start it never does, and BAPO is clipping at its first bounds, 0.6 and 1.2."""

CANNOT_SHOW = """\
- Anything about models, responses and learning rates far from the recipe's. The default recipe has a
  policy of 0.2 M parameters, which its few habits share, responses of tens of tokens, and one task that
  is nearly solved when all goes well.
- What the learning rate does: there is one. The default recipe's was chosen so that a stale run can
  fail, which favours whatever is cautious.
- That staleness alone is at work between the settings by reuse: more reuse also means more updates, as
  in the paper. `fresh_matched` takes that apart for GRPO at one level.
- What BAPO does where negative tokens rule. Here right responses are the longer ones, and a group's
  normalised advantages make both sides about equal, so the paper's target of 0.4 is mostly met as it is:
  see *bounds moved*. `balanced_half` asks for half instead.
- What c_low does by itself (Fig. 7), or responses that are longer when they are wrong (Fig. 6).
- The scope `micro_batch` of the published code, where a micro-batch is a whole update, as in the default
  recipe."""
