"""The stub and the built module name the same things, with the same parameters, both ways.

A stale stub would let a type checker accept calls that fail, or refuse calls that work.
"""

import ast
import re
from pathlib import Path

import rrfp
from rrfp import _C

STUB = ast.parse((Path(rrfp.__file__).parent / "_C.pyi").read_text())
# Members that every enum has, beside its values.
ENUM_OWN = {"name", "value"}


def stub_members(body):
    """``{name: parameter names, or None for what is no function}`` of a module or class."""
    members = {}
    for node in body:
        if isinstance(node, ast.FunctionDef):
            is_property = any(getattr(d, "id", "") == "property" for d in node.decorator_list)
            arguments = [a.arg for a in node.args.args]
            members[node.name] = None if is_property else arguments
        elif isinstance(node, ast.ClassDef):
            members[node.name] = None
        elif isinstance(node, ast.AnnAssign):
            members[node.target.id] = None
        elif isinstance(node, ast.Assign):
            members[node.targets[0].id] = None
    return members


def parameters_in_docstring(text):
    """Parameter names of the signature that pybind11 writes first into a docstring."""
    signature = text.split("\n")[0]
    inside = signature[signature.index("(") + 1 : signature.rindex(") ->")]
    flat = re.sub(r"\[[^\[\]]*\]", "", re.sub(r"\[[^\[\]]*\]", "", inside))
    return [part.split(":")[0].strip() for part in flat.split(",") if part.strip()]


def built_members(owner):
    members = {}
    for name, value in vars(owner).items():
        if name.startswith("_") or name in ENUM_OWN:
            continue
        is_function = callable(value) and not isinstance(value, type)
        if is_function and not hasattr(owner, "__members__"):
            members[name] = parameters_in_docstring(value.__doc__)
        else:
            members[name] = None
    return members


def is_constructible(owner):
    return ") ->" in (owner.__init__.__doc__ or "") and not hasattr(owner, "__members__")


def test_module_names_and_parameters():
    stub, built = stub_members(STUB.body), built_members(_C)
    assert stub.keys() == built.keys()
    for name, parameters in built.items():
        assert stub[name] == parameters, name


def test_class_members_and_parameters():
    classes = [node for node in STUB.body if isinstance(node, ast.ClassDef)]
    assert len(classes) >= 8
    for node in classes:
        owner = getattr(_C, node.name)
        if issubclass(owner, BaseException):
            continue  # its attributes are set on instances: test_errors_surface.py
        stub = stub_members(node.body)
        built = built_members(owner)
        if is_constructible(owner):
            built["__init__"] = parameters_in_docstring(owner.__init__.__doc__)
        assert stub.keys() == built.keys(), node.name
        for name, parameters in built.items():
            assert stub[name] == parameters, f"{node.name}.{name}"


def test_package_is_typed():
    assert (Path(rrfp.__file__).parent / "py.typed").exists()


def test_every_public_name_has_a_docstring():
    for name in rrfp.__all__:
        assert getattr(rrfp, name).__doc__, name
