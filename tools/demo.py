"""What `make demo` shows today. The full demonstration needs the client and the server."""

from __future__ import annotations

import tinsmith
from tinsmith.wire import proto

if __name__ == "__main__":
    datum = tinsmith.Datum(
        model_input=tinsmith.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 1.0]},
    )
    request = tinsmith.types.ForwardBackwardRequest(
        tinsmith.types.ForwardBackwardInput([datum], "cross_entropy"), "model", 1
    )
    body = proto.encode_pass(request)
    print("This is a placeholder: training and sampling come with the server and the client.")
    print(f"What exists is the vocabulary and its wire form. One datum:\n  {datum}")
    print(f"as a request body, {len(body)} bytes:\n  {body.hex()}")
    print(f"decoded again, equal: {proto.decode_pass(body) == request}")
