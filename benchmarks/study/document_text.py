"""The constant prose of a study's document."""

from benchmarks.study.claims import LEAST_MOVED
from benchmarks.study.measures import COLLAPSE_SHARE, ENTROPY_SHARE, SPIKE_FACTOR, SPIKE_WINDOW
from benchmarks.study.paired import LEAST_PAIRS

METHOD = """\
## What was run

The study runs one recipe under several methods at several degrees of staleness. Every arm is an ordinary
`bapo train` run; `study.json` in the study's folder has all commands. Methods share seeds, so they draw
from one stream of prompts, and in the settings with reuse they have the same first batch; later batches
differ, since dropped groups are replaced. On-policy every ratio is 1 and no bound clips, so GRPO's run
stands for all methods that differ by their bounds alone. `fresh_matched` makes as many updates as
`stale_7`, each of as many responses, but fresh ones, and so on twice the data. It separates staleness from
the number and the size of the updates."""

VERDICTS = f"""\
Each claim is one difference between two arms, paired by seed; several settings are averaged within a
seed first. The interval is Student's, at 95 %. **Seen**: the interval lies on the claimed side of 0 and
reaches the least effect that matters. **Opposite**: the same on the other side. **Not seen**: the interval
excludes every claimed effect that matters; the opposite effect may lie within. **Not distinguishable**:
both 0 and an effect that matters lie within the interval, or there are fewer than {LEAST_PAIRS} seeds. **Not
tried**: no seed has both arms."""

UNMOVED_BOUNDS = f"""\
BAPO begins each search at 0.6 and 1.2, and moves the bounds only where the positive tokens contribute too
little. Where fewer than {100 * LEAST_MOVED:.0f} % of the updates move them, an arm shows what *clipping at
0.6 and 1.2* does, which lets more negative tokens through than GRPO's 0.8, and nothing about the search."""

AGAINST_GRPO = """\
Differences in the share of held-out problems answered right, with 95 % intervals and the number of seeds. A
mean over settings can hide that the settings differ."""

DEFINITIONS = f"""\
- Final values are means over the last tenth of the steps (1 to 5 of them). The entropy at the start is
  that of the first pass over the first batch (in `fresh_matched` over as many prompts, in small steps). ±
  is the standard deviation over seeds. Lines in the pictures are means over seeds of smoothed curves;
  shades reach from the smallest to the largest seed.
- In `partial` the first step trains on the few groups that are finished: its reward and entropy are not
  comparable to the first step of other settings.
- *Held-out*: share of the evaluation problems that the last weights answer right.
- *Deepest fall* (`drawdown`): how far the running mean of the reward falls below its best so far.
- *Entropy, end / start* (`entropy_kept`): the entropy of the groups trained on, at the end over at the
  start.
- *Collapse*: the reward ends below {COLLAPSE_SHARE:g} of its best running mean. *Entropy collapse*: the
  entropy ends below {ENTROPY_SHARE:g} of what it was at the start.
- *Spike*: an update whose gradient norm, before it is clipped, is above {SPIKE_FACTOR:g} times the
  median of the updates at its place in the {SPIKE_WINDOW} steps before it. (Within a step that reuses its
  batch the norm falls from pass to pass.) A method whose norms are always large has few spikes; the curves
  show whether norms are large or explode.
- *Positive contribution*: P / (P + N) over the tokens that have a gradient, at a method's own advantages;
  PAPO's are reweighted.
- *Clipped tokens*: share of tokens whose gradient the bounds remove, mean of the run.
- *Bounds moved*: share of the updates for which the search left its first bounds. *c_low*, *c_high*:
  means over the updates."""

CANNOT_SHOW = """\
- Anything about models, responses and learning rates far from the recipe's. The default recipe has a
  policy of 0.2 M parameters, all of which its few habits share, responses of tens of tokens, and one task
  that a good run nearly solves.
- The effect of the learning rate: there is one. The default recipe's was chosen, on runs of GRPO with seed
  0, so that a stale run can fail, which favours cautious methods; seed 0 is among the seeds here.
- The effect of staleness alone between the settings with reuse: more reuse also means more updates, as in
  the paper, smaller ones, and a warm-up that ends sooner. `fresh_matched` separates these for GRPO at one
  level.
- More than one balance of the signs. In the default recipe right responses are at first the longer ones,
  and later a group's normalised advantages make both sides about equal, so the paper's target of 0.4 is
  mostly met from the start (`balanced_half` asks for half). In `demo_study_long.py` wrong responses are
  long, as in Fig. 6, and positive tokens hold a third. `paper` asks for less: as Eq. 8 is written, a share
  of 0.22 meets its 0.4.
- PAPO as its authors run it: the formulas are ours wherever the abstract leaves them open. On `balanced`
  its weights keep the positive tokens below the target, so the search runs to the ends of its ranges; see
  `papo_grpo` and `balanced` for each alone.
- Small differences in held-out problems: there is one snapshot, and only as many problems and responses as
  the table says.
- The scope `micro_batch` of the published code, where a micro-batch is a whole update, as in the default
  recipe."""
