"""Walking a CUDA graph, with a driver that answers as cuda.bindings does."""

from enum import IntEnum
from types import SimpleNamespace as Struct
from typing import Any

import pytest

from graphattn._capture.inspect import copies, cuda_driver, faults, kinds, operations, walk


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1


OK, INVALID = Status
PINNED, ON_DEVICE, PAGEABLE = 0x1000, 0x2000, 0x3000  # unified addresses


class MemoryType(IntEnum):
    CU_MEMORYTYPE_HOST = 1
    CU_MEMORYTYPE_DEVICE = 2
    CU_MEMORYTYPE_ARRAY = 3
    CU_MEMORYTYPE_UNIFIED = 4


HOST, DEVICE, ARRAY, UNIFIED = MemoryType


class FakeDriver:
    """Graphs as {handle: ([(kind, parameters)], [(from, to)])}; nodes are numbered per graph."""

    CUmemorytype = MemoryType
    CUpointer_attribute = Struct(CU_POINTER_ATTRIBUTE_MEMORY_TYPE=2)

    def __init__(self, graphs: dict[int, Any]) -> None:
        self._nodes = {}
        self._graphs = {}
        for graph, (nodes, edges) in graphs.items():
            handles = [graph * 100 + i for i in range(len(nodes))]
            self._nodes |= dict(zip(handles, nodes, strict=True))
            self._graphs[graph] = (handles, [(handles[a], handles[b]) for a, b in edges])

    def cuGraphGetNodes(self, graph: int, count: int) -> Any:
        if graph not in self._graphs:
            return INVALID, None, 0
        handles = self._graphs[graph][0]
        return OK, ([*handles, 0] if count else None), len(handles)

    def cuGraphGetEdges(self, graph: int, count: int) -> Any:
        edges = self._graphs[graph][1]
        if not count:
            return OK, None, None, None, len(edges)
        return OK, [a for a, _ in edges], [b for _, b in edges], [None] * len(edges), len(edges)

    def cuGraphNodeGetType(self, node: int) -> Any:
        return OK, Struct(name=f"CU_GRAPH_NODE_TYPE_{self._nodes[node][0]}")

    def _params(self, node: int) -> Any:
        return OK, self._nodes[node][1]

    cuGraphKernelNodeGetParams = cuGraphMemcpyNodeGetParams = cuGraphMemsetNodeGetParams = _params
    cuGraphChildGraphNodeGetGraph = _params

    def cuPointerGetAttribute(self, attribute: int, address: int) -> Any:
        assert attribute == 2
        if address == PAGEABLE:
            return INVALID, None
        return OK, int(HOST if address == PINNED else DEVICE)

    def cuFuncGetName(self, func: int) -> Any:
        return OK, f"func{func}".encode()

    def cuKernelGetName(self, kern: int) -> Any:
        return OK, f"kern{kern}".encode()


def kernel(func: int = 0, kern: int = 0) -> Any:
    return "KERNEL", Struct(
        func=func, kern=kern, gridDimX=4, gridDimY=2, gridDimZ=1,
        blockDimX=128, blockDimY=1, blockDimZ=1, sharedMemBytes=1024,
    )  # fmt: skip


def memcpy(
    source: MemoryType = DEVICE, target: MemoryType = DEVICE, addresses: tuple[int, int] = (0, 0)
) -> Any:
    return "MEMCPY", Struct(
        WidthInBytes=64, Height=3, Depth=0, srcMemoryType=source, dstMemoryType=target,
        srcDevice=addresses[0], dstDevice=addresses[1],
    )  # fmt: skip


MEMSET = ("MEMSET", Struct(elementSize=4, width=8, height=1))


def test_walk_describes_nodes_and_order() -> None:
    driver = FakeDriver(
        {1: ([kernel(func=5), kernel(kern=6), memcpy(), MEMSET], [(0, 1), (1, 2), (2, 3)])}
    )
    nodes = walk(1, driver)
    assert [node.kind for node in nodes] == ["kernel", "kernel", "memcpy", "memset"]
    assert [node.name for node in nodes] == ["func5", "kern6", "", ""]
    assert (nodes[0].grid, nodes[0].block, nodes[0].shared_bytes) == ((4, 2, 1), (128, 1, 1), 1024)
    assert [node.num_bytes for node in nodes] == [0, 0, 192, 32]
    assert [node.after for node in nodes] == [(), (0,), (1,), (2,)]
    assert faults(nodes) == []
    assert kinds(nodes) == {"kernel": 2, "memcpy": 1, "memset": 1}


def test_faults_name_the_node() -> None:
    nodes = walk(
        1,
        FakeDriver(
            {
                1: (
                    [kernel(1), memcpy(HOST), ("HOST", None), ("MEM_ALLOC", None),
                     ("EVENT_RECORD", None), kernel(2), ("GRAPH", 2)],
                    [(0, 1), (0, 5), (1, 5)],
                ),
                2: ([("WAIT_EVENT", None), kernel(3)], []),
            }
        ),
    )  # fmt: skip
    found = faults(nodes)
    assert "node 1 (memcpy) copies 192 bytes through a frozen host address" in found
    assert "node 2 (host) calls the host at every replay" in found
    assert "node 3 (mem_alloc) allocates during replay: preallocate" in found
    assert "node 4 (event_record) ties the graph to work outside it" in found
    assert "node 5 (kernel) waits for several: a side stream" in found
    assert "node 0 (wait_event) ties the graph to work outside it" in found
    assert len(found) == 6
    assert kinds(nodes)["kernel"] == 3
    assert [node.kind for node in nodes[6].children] == ["wait_event", "kernel"]


def test_operations_by_name_and_copies_by_direction() -> None:
    """torch captures copies with unified addresses: only the driver knows what lies there."""
    unified = [memcpy(UNIFIED, UNIFIED, ends) for ends in
               ((ON_DEVICE, ON_DEVICE), (PINNED, ON_DEVICE), (ON_DEVICE, PAGEABLE))]  # fmt: skip
    nodes = walk(
        1,
        FakeDriver(
            {
                1: ([kernel(5), kernel(5), kernel(kern=5), MEMSET, *unified, ("GRAPH", 2)], []),
                2: ([kernel(5), memcpy(), memcpy(ARRAY)], []),
            }
        ),
    )
    assert operations(nodes) == {"func5": 3, "kern5": 1, "memset": 1, "memcpy": 5}
    assert copies(nodes) == {
        "device to device": 2, "host to device": 1, "device to host": 1, "array to device": 1
    }  # fmt: skip
    assert [node.host for node in nodes[4:7]] == [False, True, True]
    assert len(faults(nodes)) == 2


def test_an_empty_graph_and_a_wrong_one() -> None:
    assert walk(1, FakeDriver({1: ([], [])})) == ()
    with pytest.raises(RuntimeError, match="CUDA driver: CUDA_ERROR_INVALID_VALUE"):
        walk(9, FakeDriver({}))


def test_the_fake_has_the_fields_of_the_bindings() -> None:
    """What the walk reads exists under these names in cuda.bindings; structs need no driver."""
    driver: Any = cuda_driver()
    for function in (
        "cuGraphGetNodes", "cuGraphGetEdges", "cuGraphNodeGetType", "cuGraphKernelNodeGetParams",
        "cuGraphMemcpyNodeGetParams", "cuGraphMemsetNodeGetParams", "cuGraphChildGraphNodeGetGraph",
        "cuFuncGetName", "cuKernelGetName", "cuPointerGetAttribute",
    ):  # fmt: skip
        assert callable(getattr(driver, function))
    structs = {
        driver.CUDA_KERNEL_NODE_PARAMS: vars(kernel()[1]),
        driver.CUDA_MEMCPY3D: vars(memcpy()[1]),
        driver.CUDA_MEMSET_NODE_PARAMS: vars(MEMSET[1]),
    }
    for struct, fields in structs.items():
        assert set(fields) <= set(dir(struct)), struct
    assert {t.name: t.value for t in MemoryType} == {t.name: t.value for t in driver.CUmemorytype}
    assert driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE == 2
    names = {t.name for t in driver.CUgraphNodeType}
    for kind in (
        "KERNEL",
        "MEMCPY",
        "MEMSET",
        "HOST",
        "GRAPH",
        "MEM_ALLOC",
        "MEM_FREE",
        "WAIT_EVENT",
        "EVENT_RECORD",
    ):
        assert f"CU_GRAPH_NODE_TYPE_{kind}" in names
