"""etcd's messages and stubs, from the `etcd3` package, on any protobuf from 4.25 on. Importing this loads all of it.

etcd3 0.12.0 is from 2020, and its generated `*_pb2.py` files do not run on protobuf 4 and newer. Their serialized
descriptors are still right: this takes them out without running the files, builds the message classes with the
installed protobuf in a private pool, and registers them as etcd3's modules; then etcd3 is imported unchanged. No other
user of protobuf in this process is affected. The import costs 0.1 s (grpc and etcd3).
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from elasticd.errors import UsageError

# In the order in which they build on each other.
_PROTO_NAMES = ("kv", "auth", "rpc")
# The one argument of the generated code that holds a whole .proto file, as a string of Latin-1 characters.
_SERIALIZED_PB = re.compile(r"serialized_pb=_b\(('(?:[^'\\]|\\.)*')\)")


def _load() -> Any:
    if "etcd3.etcdrpc" not in sys.modules:
        package = importlib.util.find_spec("etcd3")
        if package is None or not package.submodule_search_locations:
            raise UsageError("the etcd3 package is not installed; 'pip install etcd3' installs it")
        folder = Path(package.submodule_search_locations[0], "etcdrpc")
        pool = descriptor_pool.DescriptorPool()
        for name in _PROTO_NAMES:
            sys.modules[f"etcd3.etcdrpc.{name}_pb2"] = _make_module(pool, name, folder / f"{name}_pb2.py")
    import etcd3.etcdrpc

    return etcd3.etcdrpc


def _make_module(pool: descriptor_pool.DescriptorPool, name: str, generated: Path) -> ModuleType:
    descriptor = _SERIALIZED_PB.search(generated.read_text(encoding="utf-8"))
    if descriptor is None:
        raise UsageError(f"{generated} does not look like etcd3 0.12.0; 'pip install etcd3==0.12.0' installs it")
    text: str = ast.literal_eval(descriptor[1])
    described = descriptor_pb2.FileDescriptorProto.FromString(text.encode("latin-1"))
    pool.Add(described)
    file = pool.FindFileByName(described.name)
    module = ModuleType(f"etcd3.etcdrpc.{name}_pb2")
    members: dict[str, object] = {"DESCRIPTOR": file}
    for message in file.message_types_by_name.values():
        members[message.name] = message_factory.GetMessageClass(message)
    for enum in file.enum_types_by_name.values():
        members.update((value.name, value.number) for value in enum.values)
    vars(module).update(members)
    return module


rpc: Any = _load()
"""The module `etcd3.etcdrpc`: message classes such as `RangeRequest`, stubs such as `KVStub`."""
