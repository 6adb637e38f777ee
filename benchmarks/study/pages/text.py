"""Constant prose of a study's document: definitions and limits, never a result."""

from benchmarks.study.contrasts import LEVEL, MATTERS
from benchmarks.study.measures import COLLAPSE_SHARE, SPIKE_FACTOR, SPIKE_WINDOW
from benchmarks.study.paired import LEAST_PAIRS

LATER = """\
This is the first of three studies, and all have run. [The
second](../benchmarks/results/controller_study.md) asks again, with gates and rates of its own; [the
third](../benchmarks/results/real_model_study.md) asks on a pretrained model. What follows from all:
[results.md](results.md)."""

METHOD = """\
An arm is one `bapo train` run: one method, one number of passes, one seed. Its command stands in its line
of the results. Staleness is the number of passes over each batch, as the paper counts it: 1x is on-policy,
at 8x each batch makes eight updates, each of the whole batch. All methods have the same seeds, and so the
same stream of prompts and the same first batch. What is judged, and how, was [written down
before](results.md#how-the-study-was-planned)."""

GATES = """\
A method can be judged only where the problem that it solves occurs. So GRPO alone must show, on average
over its seeds, what the paper's GRPO shows. If one gate fails, no method is judged. ± is the standard
error of the mean; a gate compares the mean alone."""

UNJUDGED = """\
All differences below are measured, with their intervals. They hold for this task. Whether they would hold
where all gates hold, this study does not say."""

PRIMARY = f"""\
Mean reward over the run at 8x, `paper` (BAPO with a search in each micro-batch) minus the other, paired
by seed: 95 % interval by Student's t, p-value of the paired test, and Holm's correction for the
contrasts together. A difference is called better or worse if Holm's p is below {LEVEL:g}; from
{MATTERS:g} on it matters. Fewer than {LEAST_PAIRS} seeds say nothing."""

REPAIR = """\
Of several methods tried, the best looks better than it is. So one half of the seeds chooses the best of
our changes of the search, and the best pair of fixed bounds; the other half compares the two."""

SECONDARY = """\
Differences from GRPO at the same passes with 95 % intervals, paired by seed and not corrected for their
number: about one in twenty excludes 0 by luck alone. *Entropy at equal reward* compares both arms where
each first reaches the best reward that both reach; otherwise a method that learns less would seem to keep
more entropy."""

UNPLANNED = """\
Differences in mean reward that no one had planned to judge; what BAPO adds to the bounds where its search
begins, and what reuse costs."""

DEFINITIONS = f"""\
± is the standard deviation over seeds. If a batch is used several times, clipped tokens, shares, bounds
and ratios are means over the updates after the first pass: in the first pass every ratio is 1.

- *Mean reward*: over all steps of the run. *Held-out*: share of the responses to the evaluation problems
  that the last weights answer right.
- *Collapse*: the reward ends below {COLLAPSE_SHARE:g} of its best running mean (a tenth of the steps, 1
  to 5).
- *Entropy kept*: running mean at the end over that of the first pass over the first batch.
- *Spike*: an update whose gradient norm, before it is clipped, is above {SPIKE_FACTOR:g} times the
  median of the updates at its place in the {SPIKE_WINDOW} steps before it.
- *Clipped*: share of the tokens that the method's own loss clips or masks; some losses clip nothing.
- *Positive share*: P / (P + N), the positive tokens' share of the gradient's mass.
- *c_low*, *c_high*: means over the negative and over the positive tokens, on which they act. *Bounds
  moved*: share of the updates whose search left its first bounds (in micro-batches: of which any search
  did)."""

SCOPE = """\
Nothing, except this. If a method works because clipping low-probability tokens costs entropy and balance,
then it must work wherever these preconditions hold, and the gates say whether they hold here. Where they
hold, a small run can show that the mechanism works, or that something simpler does as much. It cannot show
how large the effect is for a model with a hundred thousand times the parameters, responses a hundred times
as long, rewards that need reasoning, and learning rates a thousand times smaller; nor which learning rate
a method would need there. All methods have GRPO's learning rate, which favours methods as cautious as
GRPO. Losses have the settings of their papers, which were found on other tasks."""

QUICK = """\
> **This is `--quick`**: three methods, two seeds. It shows that the study runs and what its pages look
> like. It does not show which method is better: no gate and no contrast means anything with two seeds,
> and none is judged."""

CALIBRATION = """\
> **This is a calibration**: GRPO alone, with seeds that the study does not use, to choose the learning
> rate by the gates. Nothing is judged."""
