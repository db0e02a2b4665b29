"""What a choice between a plan and the baselines rests on."""

from halograd.models import build
from halograd.perfmodel.confirm import rests_on
from halograd.perfmodel.cost import Training, simulate
from halograd.perfmodel.cost.baselines import BASELINES, baseline
from halograd.perfmodel.kernel_times import Recorded, RooflineTimes
from halograd.perfmodel.layer_work import LayerTime
from halograd.perfmodel.machine import Machine
from halograd.perfmodel.predict import plan_network

MACHINE = Machine.load("p100-cluster")
BATCH, RANKS = 8, 4


class Disturbed(Recorded):
    """Some layers take a second longer."""

    def __init__(self, keys):
        super().__init__(RooflineTimes(MACHINE))
        self.keys = keys

    def of_work(self, work):
        time = super().of_work(work)
        return (
            LayerTime(time.forward + 1.0, time.backward_data, time.backward_filter) if work.key in self.keys else time
        )


def test_predictions_rest_on_these_layers_and_no_others():
    network = build("lenet5")
    times = Recorded(RooflineTimes(MACHINE))
    plan = plan_network(network, BATCH, RANKS, MACHINE, times)
    behind = rests_on(plan, network, MACHINE, times, Training())
    others = times.asked.keys() - behind.keys()
    assert behind and others, "the planner has looked at more than it chose"
    strategies = [plan.strategy, *(baseline(name, network, BATCH, RANKS) for name in BASELINES)]

    def seconds(keys):
        return [simulate(network, s, BATCH, MACHINE, Disturbed(keys), Training()).step_seconds for s in strategies]

    quiet = seconds(set())
    assert seconds(others) == quiet
    for key in behind:
        assert max(a - b for a, b in zip(seconds({key}), quiet)) > 0.5
