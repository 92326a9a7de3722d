"""The three messages that travel as protobuf: a pass, its output, and a sampling result.

The field numbers are those of `tinker_public.proto`. Arrays are neither copied nor looked at
element by element: encoding lists their buffers, decoding makes views of the body.
"""

from tinsmith.wire.proto.outputs import decode_output, encode_output
from tinsmith.wire.proto.passes import Pass, decode_pass, encode_pass
from tinsmith.wire.proto.samples import decode_sample, encode_sample

__all__ = [
    "Pass",
    "decode_output",
    "decode_pass",
    "decode_sample",
    "encode_output",
    "encode_pass",
    "encode_sample",
]
