"""Look into a captured CUDA graph through cuda.bindings.

Works on the raw graph of `torch.cuda.CUDAGraph(keep_graph=True)`. The driver is an argument, so
that the walk can be tested without one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a graph: its kind, and what is known of a kernel, copy or fill.

    `kind` is the driver's name in lower case ("kernel", "memcpy", "memset", "host", "graph", ...).
    `after` are the indices of the nodes it waits for. `num_bytes` is the size of a copy or fill,
    `direction` of a copy is "device to device" and the like, `host` whether it has an end in host
    memory, `children` the nodes of a child graph.
    """

    index: int
    kind: str
    name: str = ""
    grid: tuple[int, int, int] = (0, 0, 0)
    block: tuple[int, int, int] = (0, 0, 0)
    shared_bytes: int = 0
    num_bytes: int = 0
    host: bool = False
    direction: str = ""
    after: tuple[int, ...] = ()
    children: tuple[Node, ...] = field(default=(), repr=False)


def cuda_driver() -> Any:
    """`cuda.bindings.driver`, imported when first needed."""
    from cuda.bindings import driver

    return driver


def walk(raw_graph: int, driver: Any = None) -> tuple[Node, ...]:
    """The nodes of a `cudaGraph_t`, in the driver's order. Raises `RuntimeError` on its errors."""
    driver = driver or cuda_driver()
    _, count = _checked(driver.cuGraphGetNodes(raw_graph, 0))
    handles = list(_checked(driver.cuGraphGetNodes(raw_graph, count))[0])[:count] if count else []
    after = _edges(raw_graph, handles, driver)
    return tuple(
        Node(index=i, after=after[i], **_describe(handle, driver))
        for i, handle in enumerate(handles)
    )


def kinds(nodes: Sequence[Node]) -> Mapping[str, int]:
    """Number of nodes by kind, child graphs included."""
    counts = Counter(node.kind for node in nodes)
    for node in nodes:
        counts.update(kinds(node.children))
    return dict(counts)


def operations(nodes: Sequence[Node]) -> Mapping[str, int]:
    """Number of nodes by the name of their kernel, by their kind where they have none.

    A child graph counts as what is in it.
    """
    counts = Counter(node.name or node.kind for node in nodes if node.kind != "graph")
    for node in nodes:
        counts.update(operations(node.children))
    return dict(counts)


def copies(nodes: Sequence[Node]) -> Mapping[str, int]:
    """Number of copies by direction, child graphs included."""
    counts = Counter(node.direction for node in nodes if node.direction)
    for node in nodes:
        counts.update(copies(node.children))
    return dict(counts)


def faults(nodes: Sequence[Node]) -> list[str]:
    """What a static step must not contain; empty for a clean graph."""
    found = [fault for node in nodes for fault in _faults_of(node)]
    for node in nodes:
        if len(node.after) > 1:
            found.append(f"node {node.index} ({node.kind}) waits for several: a side stream")
        found.extend(faults(node.children))
    return found


def _faults_of(node: Node) -> list[str]:
    label = f"node {node.index} ({node.kind})"
    if node.kind in ("mem_alloc", "mem_free"):
        return [f"{label} allocates during replay: preallocate"]
    if node.kind == "host":
        return [f"{label} calls the host at every replay"]
    if node.kind in ("wait_event", "event_record"):
        return [f"{label} ties the graph to work outside it"]
    if node.kind == "memcpy" and node.host:
        return [f"{label} copies {node.num_bytes} bytes through a frozen host address"]
    return []


def _checked(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values of a driver call, without its status."""
    if int(result[0]) != 0:
        raise RuntimeError(f"CUDA driver: {getattr(result[0], 'name', result[0])}")
    return result[1:]


def _edges(raw_graph: int, handles: list[Any], driver: Any) -> list[tuple[int, ...]]:
    """For each node the indices of the nodes it depends on."""
    number = {int(handle): i for i, handle in enumerate(handles)}
    after: list[list[int]] = [[] for _ in handles]
    count = _checked(driver.cuGraphGetEdges(raw_graph, 0))[-1]
    if count:
        sources, targets, *_ = _checked(driver.cuGraphGetEdges(raw_graph, count))
        for source, target in zip(list(sources)[:count], list(targets)[:count], strict=True):
            after[number[int(target)]].append(number[int(source)])
    return [tuple(indices) for indices in after]


def _describe(handle: Any, driver: Any) -> dict[str, Any]:
    (node_type,) = _checked(driver.cuGraphNodeGetType(handle))
    kind = node_type.name.removeprefix("CU_GRAPH_NODE_TYPE_").lower()
    describe = {
        "kernel": _kernel,
        "memcpy": _memcpy,
        "memset": _memset,
        "graph": _child,
    }.get(kind)
    return {"kind": kind, **(describe(handle, driver) if describe else {})}


def _kernel(handle: Any, driver: Any) -> dict[str, Any]:
    (params,) = _checked(driver.cuGraphKernelNodeGetParams(handle))
    return {
        "name": _kernel_name(params, driver),
        "grid": (params.gridDimX, params.gridDimY, params.gridDimZ),
        "block": (params.blockDimX, params.blockDimY, params.blockDimZ),
        "shared_bytes": params.sharedMemBytes,
    }


def _kernel_name(params: Any, driver: Any) -> str:
    """A node holds a function or, since lazily loaded libraries, a kernel."""
    if int(params.func):
        (name,) = _checked(driver.cuFuncGetName(params.func))
    elif int(params.kern):
        (name,) = _checked(driver.cuKernelGetName(params.kern))
    else:
        return ""
    return name.decode() if isinstance(name, bytes) else str(name)


def _memcpy(handle: Any, driver: Any) -> dict[str, Any]:
    (params,) = _checked(driver.cuGraphMemcpyNodeGetParams(handle))
    source = _end(params.srcMemoryType, params.srcDevice, driver)
    target = _end(params.dstMemoryType, params.dstDevice, driver)
    return {
        "num_bytes": params.WidthInBytes * max(1, params.Height) * max(1, params.Depth),
        "host": "host" in (source, target),
        "direction": f"{source} to {target}",
    }


def _end(memory_type: Any, address: Any, driver: Any) -> str:
    """Where an end of a copy lies: "host", "device" or "array".

    A unified address is looked up; one that the driver does not know is pageable host memory.
    """
    types = driver.CUmemorytype
    if memory_type == types.CU_MEMORYTYPE_UNIFIED:
        attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        status, found = driver.cuPointerGetAttribute(attribute, address)
        memory_type = types.CU_MEMORYTYPE_HOST if int(status) else types(found)
    return str(memory_type.name.removeprefix("CU_MEMORYTYPE_").lower())


def _memset(handle: Any, driver: Any) -> dict[str, Any]:
    (params,) = _checked(driver.cuGraphMemsetNodeGetParams(handle))
    return {"num_bytes": params.elementSize * params.width * max(1, params.height)}


def _child(handle: Any, driver: Any) -> dict[str, Any]:
    (graph,) = _checked(driver.cuGraphChildGraphNodeGetGraph(handle))
    return {"children": walk(graph, driver)}
