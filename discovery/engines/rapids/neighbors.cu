// The exact distances of neighbours that a library found, in order.
//
//     distance(q, i) = sqrt(sum_d (queries[q, d] - fit[found[q, i], d])^2)
//
// Libraries find neighbours by |q|^2 - 2 q.f + |f|^2, which cancels where rows lie close together.
// Rows of a query are sorted by (distance, index). What was not found (no such row) comes last, at
// an infinite distance.
//
//     fit float[n, d]   queries float[m, d]   found int64[m, k]   index int[m, k]   distance float[m, k]

extern "C" __global__ void refine(const float* fit, const float* queries, const long long* found,
                                  int* index, float* distance, long long n, long long m, int k,
                                  int d) {
  long long q = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (q >= m) return;
  const float* query = queries + q * d;
  for (int i = 0; i < k; i++) {
    long long row = found[q * k + i];
    float apart = __uint_as_float(0x7f800000u);
    if (row < 0 || row >= n) {
      row = 0x7fffffff;
    } else {
      float sum = 0.0f;
      for (int c = 0; c < d; c++) {
        float difference = query[c] - fit[row * d + c];
        sum += difference * difference;
      }
      apart = sqrtf(sum);
    }
    long long at = q * k + i;
    for (; at > q * k; at--) {
      if (distance[at - 1] < apart || (distance[at - 1] == apart && index[at - 1] < row)) break;
      distance[at] = distance[at - 1];
      index[at] = index[at - 1];
    }
    distance[at] = apart;
    index[at] = (int)row;
  }
}
