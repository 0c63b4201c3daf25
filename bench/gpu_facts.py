"""What a run on a GPU says of the kernels that served it, and whether they are those that it was asked for.

The last record of `tessera train --device cuda --format json` has an object "gpu": calls of attention by kind of kernel,
steps that were queued or launched as a graph, products whose epilogue was fused. A rate that was measured with other
kernels than the table says is worse than none, so gpu.py shows no rate for a run that why_refused() refuses.
"""

KINDS = ("cudnn", "tensor cores", "plain")


def option(words, name, otherwise=None):
    """What stands behind `name` in a command line."""
    return words[words.index(name) + 1] if name in words else otherwise


def wanted_of(words):
    """{"attention": a kind or None, "graph": "on", "off" or None}: what a command line of `train` asks for."""
    attention, graph = option(words, "--attention"), option(words, "--cuda-graph")
    if attention == "own":  # kernels for tensor cores take bf16 and these head sizes; a ring's tiles are its own affair
        head = int(option(words, "--channels", 0)) // int(option(words, "--heads", 1))
        tiles = option(words, "--dtype", "fp32") == "bf16" and head in (64, 128)
        attention = "own" if "--cp" in words else "tensor cores" if tiles else "plain"
    return {"attention": attention, "graph": graph if graph in ("on", "off") else None}


def why_refused(gpu, wanted):
    """Why the run is not what was asked for; empty where it is."""
    if not isinstance(gpu, dict):
        return "the run says nothing of its GPU's kernels"
    try:
        return attention_refused(gpu["attention"], wanted["attention"]) or graph_refused(gpu["graph"], wanted["graph"])
    except (KeyError, TypeError) as e:
        return f"the run's words on its GPU are not understood: {e!r}"


def attention_refused(attention, kind):
    if kind is None:
        return ""
    for way in ("forward", "backward"):
        counts = attention[way]
        others = {k: counts[k] for k in KINDS if counts[k] > 0 and k != kind and not (kind == "own" and k != "cudnn")}
        served = sum(counts[k] for k in KINDS) - sum(others.values())
        if others or served == 0:
            found = ", ".join(f"{n} by {k}" for k, n in others.items()) or "none"
            reasons = "; ".join(attention.get("refused", []))
            return f"attention {way}: asked for {kind}, found {found}" + (f" ({reasons})" if reasons else "")
    return ""


def graph_refused(graph, asked):
    if asked == "off" and graph["replays"] > 0:
        return f"graph: asked for off, found {graph['replays']} launches"
    if asked == "on":
        if graph["replays"] == 0 or graph["why_not"]:
            return f"graph: asked for on, found {graph['replays']} launches ({graph['why_not'] or 'no cause was given'})"
        if graph["queued"] > graph["replays"]:  # the rate is the median of steps
            return f"graph: asked for on, found {graph['queued']} steps queued and {graph['replays']} launched"
    return ""


def describe(gpu):
    """One line of what served a run, for a table and for standard error."""
    if not isinstance(gpu, dict):
        return "not said"
    try:
        parts = []
        for way in ("forward", "backward"):
            counts = gpu["attention"][way]
            parts.append(f"attention {way} " + (", ".join(f"{counts[k]} {k}" for k in KINDS if counts[k]) or "none"))
        parts += [f"cuDNN refused: {reason}" for reason in gpu["attention"]["refused"]]
        graph = gpu["graph"]
        parts.append(f"graph {graph['captures']} captured, {graph['replays']} launched, {graph['queued']} queued"
                     + (f" ({graph['why_not']})" if graph["why_not"] else ""))
        for name, counts in gpu["epilogues"].items():
            parts.append(f"{name.replace('_', ' ')} {counts['fused']} fused, {counts['apart']} apart")
        parts.append(f"{gpu['padded_products']} padded products")
        return "; ".join(parts).replace("|", "/").replace("\n", " ")
    except (KeyError, TypeError, AttributeError) as e:
        return f"not understood: {e!r}"
