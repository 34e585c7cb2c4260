"""What headrace costs, always as ratios to a peer measured in the same run.

Machines change speed by half within minutes, so no absolute time is a result here: every row names its peer, and both were
measured back to back. Peers: `DecodeStream.step` of the `tokenizers` library (always there), and SGLang's compiled server where its
extension is given (`--rust-so`): of that one only the two threads that do this work are counted, read per thread from /proc.
"""
