"""The exact top k of keys: of each query head, and of the mean over the heads.

The top-k merge of a head is `merge_top_k` in `merge`: it finds the k largest in the `buckets` that
the pass over the keys keeps, and `rescan` reads a bucket again that may hold more. `head_mean`
makes and searches the head mean. `sort_key` is the order of all: value first, then age. `plan` owns
the buffers and the launches.

May import `capture_kernels.decode.step`, `launch` and `errors`.
"""
