# Reads the event files of a run directory with TensorBoard's reader and prints JSON: the [step, value] pairs of each tag, as
# displayed by TensorBoard and unfiltered.
import json
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def scalars(run, purge):
    reader = EventAccumulator(run, size_guidance={"scalars": 0}, purge_orphaned_data=purge)
    reader.Reload()
    return {tag: [[e.step, e.value] for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


with open("events.json", "w", encoding="ascii") as file:
    json.dump({"shown": scalars(sys.argv[1], True), "held": scalars(sys.argv[1], False)}, file)
