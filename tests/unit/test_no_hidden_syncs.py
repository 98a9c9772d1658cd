"""Nothing on the path of a step makes the host wait for the device, but for a few named functions.

Read from the source, so that it holds without a GPU: calls that copy to the host, Python's
conversions and conditions on tensors, and indices whose result has a size that only the device
knows. What is a tensor is inferred from torch's calls and from annotations.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ON_THE_PATH = [
    *(ROOT / "src/pagestream" / part for part in ("runner", "sampling", "layers", "models")),
    ROOT / "kernels/pagestream_kernels",
]
NOT_ON_A_GPU = {"reference", "cpu"}
CONTRACTS = [
    ROOT / "src/pagestream/scheduler/scheduler_output.py",
    ROOT / "src/pagestream/request.py",
]
"""Values of the host that the runner reads."""
ALLOWED = {
    "transfers.py: HostCopy.__init__": "copies on a stream of its own, and does not wait for them",
    "transfers.py: HostCopy.wait": "the one wait for a step's results",
    "step_future.py: StepFuture._columns": "tolist of what HostCopy has brought to the host",
    "memory.py: num_blocks_on_cuda": "once, at start: memory in use after the largest step",
}

WAITING_CALLS = {
    *("item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "unique", "bincount"),
    *("unique_consecutive", "argwhere", "is_nonzero", "synchronize", "equal", "allclose"),
}
HOST_VALUES = {
    *("dim", "size", "stride", "numel", "element_size", "data_ptr", "is_contiguous", "storage"),
    *("device", "dtype", "Generator", "get_num_threads", "set_num_threads", "is_tensor", "finfo"),
    *("iinfo", "is_floating_point", "shape", "ndim", "is_cuda", "itemsize", "type", "index"),
}
"""Members of torch and of tensors that the host knows, or that are no tensors."""
CONVERSIONS = {"int", "float", "bool", "list", "tuple", "min", "max", "sum", "any", "all", "range"}


class Tensors:
    """Which expressions of one function are tensors, and which of those are masks."""

    def __init__(self, members: set[str]) -> None:
        self._members = members
        self._names: dict[str, bool] = {}
        """Local tensors; whether each is a mask."""

    def declare(self, name: str, value: ast.expr | None = None) -> None:
        if value is None or self.is_tensor(value):
            self._names[name] = value is not None and self.is_mask(value)
        else:
            self._names.pop(name, None)

    def is_tensor(self, node: ast.expr) -> bool:
        match node:
            case ast.Name(id=name):
                return name in self._names
            case ast.Attribute(attr=name):
                return name in self._members or (name == "T" and self.is_tensor(node.value))
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)):
                return name not in HOST_VALUES
            case ast.Call(func=ast.Attribute(value=owner, attr=name)):
                return name not in HOST_VALUES | WAITING_CALLS and self.is_tensor(owner)
            case ast.Subscript(value=owner):
                return self.is_tensor(owner)
            case ast.BinOp(left=left, right=right):
                return self.is_tensor(left) or self.is_tensor(right)
            case ast.UnaryOp(op=op, operand=operand):
                return not isinstance(op, ast.Not) and self.is_tensor(operand)
            case ast.Compare(left=left, ops=ops, comparators=others):
                on_host = any(isinstance(op, (ast.Is, ast.IsNot, ast.In, ast.NotIn)) for op in ops)
                return not on_host and any(map(self.is_tensor, [left, *others]))
        return False

    def is_mask(self, node: ast.expr) -> bool:
        match node:
            case ast.Name(id=name):
                return self._names.get(name, False)
            case ast.Compare():
                return self.is_tensor(node)
            case ast.UnaryOp(operand=operand):
                return self.is_mask(operand)
            case ast.BinOp(op=ast.BitAnd() | ast.BitOr() | ast.BitXor(), left=left, right=right):
                return self.is_mask(left) or self.is_mask(right)
        return False


class Finder(ast.NodeVisitor):
    """Collects (function, line, what waits)."""

    def __init__(self, members: set[str]) -> None:
        self.found: list[tuple[str, int, str]] = []
        self._members = members
        self._path: list[str] = []
        self._tensors = Tensors(members)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._path.append(node.name)
        self.generic_visit(node)
        self._path.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer, self._tensors = self._tensors, Tensors(self._members)
        arguments = node.args
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            if argument.annotation is not None and is_tensor_type(argument.annotation):
                self._tensors.declare(argument.arg)
        self._path.append(node.name)
        self.generic_visit(node)
        self._path.pop()
        self._tensors = outer

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self._tensors.declare(target.id, node.value)
            elif isinstance(target, ast.Tuple):
                values = [node.value] * len(target.elts)
                if isinstance(node.value, ast.Tuple):
                    values = node.value.elts
                for name, value in zip(target.elts, values, strict=False):
                    if isinstance(name, ast.Name):
                        self._tensors.declare(name.id, value)

    def visit_Call(self, node: ast.Call) -> None:
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        match node.func:
            case ast.Name(id=name) if name in CONVERSIONS:
                if any(map(self._tensors.is_tensor, node.args)):
                    self._report(node, f"{name}() of a tensor")
            case ast.Attribute(attr=name) if name in WAITING_CALLS:
                self._report(node, f".{name}()")
            case ast.Attribute(attr="to") if is_cpu(node.args):
                self._report(node, '.to("cpu")')
            case ast.Attribute(attr="repeat_interleave") if not (
                {"output_size", None} & {*keywords}
            ):
                self._report(node, "repeat_interleave without output_size")
            case ast.Attribute(value=ast.Name(id="torch"), attr=name):
                if name in ("tensor", "as_tensor", "asarray") and "device" in keywords:
                    self._report(node, f"torch.{name} on a device: a copy that is not pinned")
                if name == "where" and len(node.args) == 1:
                    self._report(node, "torch.where of a mask alone")
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        index = node.slice
        if self._tensors.is_tensor(node.value):
            for part in index.elts if isinstance(index, ast.Tuple) else [index]:
                if self._tensors.is_mask(part):
                    self._report(node, "an index that is a mask")
                if isinstance(part, (ast.List, ast.ListComp)):
                    self._report(node, "an index that is a list: a copy that is not pinned")
                bounds = (part.lower, part.upper) if isinstance(part, ast.Slice) else ()
                if any(bound is not None and self._tensors.is_tensor(bound) for bound in bounds):
                    self._report(node, "a slice whose end is a tensor")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for value in node.values:
            self._condition(value)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._condition(node.operand)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for op, other in zip(node.ops, node.comparators, strict=True):
            if isinstance(op, (ast.In, ast.NotIn)) and self._tensors.is_tensor(other):
                self._report(node, "membership in a tensor")
        self.generic_visit(node)

    def _visit_test(self, node: ast.If | ast.While | ast.IfExp | ast.Assert) -> None:
        self._condition(node.test)
        self.generic_visit(node)

    visit_If = visit_While = visit_IfExp = visit_Assert = _visit_test

    def _condition(self, node: ast.expr) -> None:
        if self._tensors.is_tensor(node):
            self._report(node, "a condition on a tensor")

    def _report(self, node: ast.expr, what: str) -> None:
        self.found.append((".".join(self._path), node.lineno, what))


def is_tensor_type(annotation: ast.expr) -> bool:
    return ast.unparse(annotation) in ("torch.Tensor", "torch.Tensor | None", "Tensor")


def is_cpu(arguments: list[ast.expr]) -> bool:
    return any(isinstance(a, ast.Constant) and a.value == "cpu" for a in arguments)


def tensor_members(trees: list[ast.Module]) -> set[str]:
    """Attributes that hold tensors wherever there is one of that name."""
    members, of_the_host = set(), set()
    for node in [node for tree in trees for node in ast.walk(tree)] * 2:  # some are views of others
        match node:
            case ast.AnnAssign(target=ast.Name(id=name) | ast.Attribute(attr=name)):
                (members if is_tensor_type(node.annotation) else of_the_host).add(name)
            case ast.Assign(targets=[target], value=value) if Tensors(members).is_tensor(value):
                targets = target.elts if isinstance(target, ast.Tuple) else [target]
                members |= {item.attr for item in targets if isinstance(item, ast.Attribute)}
    return members - of_the_host


def waits_in(tree: ast.Module, members: set[str]) -> list[tuple[str, int, str]]:
    finder = Finder(members)
    finder.visit(tree)
    return finder.found


def test_no_step_waits_for_the_device():
    files = [
        file
        for directory in ON_THE_PATH
        for file in sorted(directory.rglob("*.py"))
        if file.parent.name not in NOT_ON_A_GPU
    ]
    trees = {file: ast.parse(file.read_text()) for file in files}
    contracts = [ast.parse(file.read_text()) for file in CONTRACTS]
    members = tensor_members([*trees.values(), *contracts])
    assert {"block_tables", "temperature", "output_counts", "slot_mapping"} <= members
    waits, excused = [], set()
    for file, tree in trees.items():
        for function, line, what in waits_in(tree, members):
            name = f"{file.name}: {function}"
            if name in ALLOWED:
                excused.add(name)
            else:
                waits.append(f"{file.relative_to(ROOT)}:{line}: {what} in {function}")
    assert waits == []
    assert excused == set(ALLOWED), "an excuse that nothing needs"


@pytest.mark.parametrize(
    "line",
    [
        "x.sum().item()",
        "x.tolist()",
        "x.cpu()",
        "x.to('cpu')",
        "x.nonzero()",
        "torch.cuda.synchronize()",
        "int(x[0])",
        "float(x.max())",
        "bool((x > 0).any())",
        "any(x > 0)",
        "if x.any(): pass",
        "while x[0] < n: pass",
        "y = x if (x > 0).all() else None",
        "assert x.max() < 1",
        "n and x.any()",
        "not x",
        "3 in x",
        "x[x > 0]",
        "mask = x > 0; y = x + 1; y[~mask] = 0",
        "kept = x >= 0; x[n, kept & (x < 9)]",
        "x[[1, 2]]",
        "end = x.max(); x[:end]",
        "self.held[self.held < 0]",
        "torch.tensor([n], device=device)",
        "torch.where(x > 0)",
        "x.repeat_interleave(x)",
    ],
)
def test_what_waits_is_found(line):
    assert len(waits_in(parse(line), {"held"})) == 1


@pytest.mark.parametrize(
    "line",
    [
        "len(x)",
        "int(n)",
        "if x is None or n: pass",
        "if x.shape[0] > 1 and x.dim() == 2: pass",
        "x.masked_fill(x < 0, 0)",
        "x[n]; x[:n]; x[x.long()]",
        "torch.where(x > 0, x, 0)",
        "x.repeat_interleave(x, output_size=n)",
        "x = n; int(x)",
        "torch.tensor([n], pin_memory=True)",
    ],
)
def test_what_does_not_wait_is_left_alone(line):
    assert waits_in(parse(line), {"held"}) == []


def parse(line):
    return ast.parse(
        f"def f(self, x: torch.Tensor, n: int):\n    {line.replace('; ', chr(10) + '    ')}"
    )
