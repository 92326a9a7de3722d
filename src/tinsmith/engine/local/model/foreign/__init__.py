"""Causal models outside our families, through `transformers`' own modules.

`transformers` lets a model's attention be a function of ours, and positions be given; that is
all our packed batches need, so such a model trains and samples through the same interface as
`decoder.Decoder`, only slower. Linear layers inside its blocks become `lora_linear`, layers of
experts `experts.Experts`, and the recurrent layers we know (`recurrent.layers`) are computed by us.

What the model asks of attention is found out by watching one forward pass without weights.
Whatever does not fit (other recurrent layers, projections that are not linear layers, another way
of attending) is refused, and before a model is served a small one of its settings is compared with
an untouched copy of its code (`trial`): a model that would be slightly wrong is not served.
"""
