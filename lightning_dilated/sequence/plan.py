"""draft"""
from lightning_dilated.sequence.exchange import butterfly, gather, ring, switch
ROUTES={"gather":(gather.why_not,gather.program),"ring":(ring.why_not,ring.program),"butterfly":(butterfly.why_not,butterfly.program),
"switch":(switch.why_not,switch.program),"hierarchical_gather":(gather.hierarchical_why_not,gather.hierarchical_program),
"hierarchical_butterfly":(butterfly.hierarchical_why_not,butterfly.hierarchical_program)}
EXCHANGES=tuple(ROUTES)
def check_exchange(name):
    if name!="auto" and name not in ROUTES:
        raise ValueError(f"exchange must be one of auto, {', '.join(ROUTES)}; got {name!r}.")
    return name
def route(problem,name,per_node):
    if name=="auto": name="gather"
    r=ROUTES[name][0](problem,per_node)
    if r: raise ValueError(f"exchange={name!r} {r}")
    return name
