// The minimum spanning tree of points in the plane under mutual reachability distance, and nearest
// neighbours, by one bounding box tree.
//
// With core(i) the distance of point i to its k-th neighbour, the distance of i and j is
//
//     m(i, j) = max(core(i), core(j), |i - j|)            (Campello, Moulavi & Sander 2013)
//
// Points are kept in the order of a Hilbert curve; LEAF of them make a leaf, and two nodes 2i and
// 2i + 1 make node i of a full binary tree of `leaves` leaves (a power of two; node 1 is the root,
// leaf l is node leaves + l). The tree is that of Boruvka's rounds too (Prokopenko, Sao & Lebrun-
// Grandie 2022, A single-tree algorithm to compute the Euclidean minimum spanning tree on GPUs): in
// each round every component finds its lightest edge that leaves it. A node that lies wholly in the
// component of the point that searches is passed over, and so is one that is farther away than the
// component's best edge so far, which all its points share.
//
// All distances are squared and in float32. Rounding is monotonic, so that a box is never farther
// away than a point in it. Edges are ordered by (weight, lower end, higher end): that order is
// strict, so no round can close a circle and the tree does not depend on who came first.
//
//     points  float2[n]            boxes  float4[2 leaves]  (x, y of the low corner, of the high one)
//     core    float[n]             least  float[2 leaves]   lowest core of a node
//     component int[n]             owner  int[2 leaves]     component of a node, MIXED or EMPTY
//     weight  float[n]   of the lightest edge of a point that leaves its component, where
//     other   int[n]     its other end is known; where that is NONE, no such edge is lighter
//     best    uint[n], pair uint64[n]   of each component (at its root): bits of the lightest
//                                       edge's weight, and its ends
//     parent  int[n]     the component that a component joined; itself at first

#define LEAF 8
#define MIXED -1
#define EMPTY -2
#define NONE -1
#define STACK 32
#define INFINITE __uint_as_float(0x7f800000u)

typedef unsigned int uint32;
typedef unsigned long long uint64;

__device__ __forceinline__ long thread() { return (long)blockIdx.x * blockDim.x + threadIdx.x; }

__device__ __forceinline__ float squared(float2 a, float2 b) {
  float x = a.x - b.x, y = a.y - b.y;
  return x * x + y * y;
}

__device__ __forceinline__ float to_box(float4 box, float2 a) {
  float x = fmaxf(fmaxf(box.x - a.x, a.x - box.z), 0.0f);
  float y = fmaxf(fmaxf(box.y - a.y, a.y - box.w), 0.0f);
  return x * x + y * y;
}

__device__ __forceinline__ uint64 ends(int i, int j) {
  return i < j ? (uint64)i << 32 | (uint32)j : (uint64)j << 32 | (uint32)i;
}

// Place along a Hilbert curve of 2^31 x 2^31 cells.
extern "C" __global__ void hilbert(const float2* points, double low_x, double low_y, double scale,
                                   uint64* code, long n) {
  long i = thread();
  if (i >= n) return;
  uint32 x = (uint32)((points[i].x - low_x) * scale), y = (uint32)((points[i].y - low_y) * scale);
  uint64 place = 0;
  for (uint32 side = 1u << 30; side > 0; side >>= 1) {
    uint32 right = (x & side) != 0, up = (y & side) != 0;
    place = place << 2 | ((3 * right) ^ up);
    if (!up) {
      if (right) {
        x = ~x;
        y = ~y;
      }
      uint32 swap = x;
      x = y;
      y = swap;
    }
  }
  code[i] = place;
}

extern "C" __global__ void leaf_boxes(const float2* points, float4* boxes, long n, long leaves) {
  long leaf = thread();
  if (leaf >= leaves) return;
  float4 box = make_float4(INFINITE, INFINITE, -INFINITE, -INFINITE);
  for (long i = leaf * LEAF; i < n && i < (leaf + 1) * LEAF; i++) {
    box.x = fminf(box.x, points[i].x);
    box.y = fminf(box.y, points[i].y);
    box.z = fmaxf(box.z, points[i].x);
    box.w = fmaxf(box.w, points[i].y);
  }
  boxes[leaves + leaf] = box;
}

// The boxes of the `count` nodes of one level, from those below.
extern "C" __global__ void join_boxes(float4* boxes, long count) {
  long node = thread() + count;
  if (node >= 2 * count) return;
  float4 a = boxes[2 * node], b = boxes[2 * node + 1];
  boxes[node] = make_float4(fminf(a.x, b.x), fminf(a.y, b.y), fmaxf(a.z, b.z), fmaxf(a.w, b.w));
}

extern "C" __global__ void leaf_cores(const float* core, float* least, long n, long leaves) {
  long leaf = thread();
  if (leaf >= leaves) return;
  float lowest = INFINITE;
  for (long i = leaf * LEAF; i < n && i < (leaf + 1) * LEAF; i++) lowest = fminf(lowest, core[i]);
  least[leaves + leaf] = lowest;
}

extern "C" __global__ void join_cores(float* least, long count) {
  long node = thread() + count;
  if (node >= 2 * count) return;
  least[node] = fminf(least[2 * node], least[2 * node + 1]);
}

extern "C" __global__ void leaf_owners(const int* component, int* owner, long n, long leaves) {
  long leaf = thread();
  if (leaf >= leaves) return;
  int found = EMPTY;
  for (long i = leaf * LEAF; i < n && i < (leaf + 1) * LEAF; i++)
    found = found == EMPTY || found == component[i] ? component[i] : MIXED;
  owner[leaves + leaf] = found;
}

extern "C" __global__ void join_owners(int* owner, long count) {
  long node = thread() + count;
  if (node >= 2 * count) return;
  int a = owner[2 * node], b = owner[2 * node + 1];
  owner[node] = a == EMPTY ? b : b == EMPTY || a == b ? a : MIXED;
}

// The K nearest of n points to each of m queries: squared distances, ascending, and indices.
#ifdef K
extern "C" __global__ void nearest(const float2* points, const float4* boxes, const float2* queries,
                                   float* distance, int* index, long n, long leaves, long m) {
  long q = thread();
  if (q >= m) return;
  float2 query = queries[q];
  float best[K];
  int row[K];
  for (int k = 0; k < K; k++) {
    best[k] = INFINITE;
    row[k] = NONE;
  }
  int stack[STACK], top = 0;
  float apart[STACK];
  int node = 1;
  while (true) {
    if (node >= leaves) {
      long first = (node - leaves) * LEAF;
      for (long i = first; i < n && i < first + LEAF; i++) {
        float d = squared(query, points[i]);
        if (!(d < best[K - 1])) continue;
        int r = (int)i;
// Short lists stay in registers; a long one would make a program of its length.
#if K <= 32
#pragma unroll
#endif
        for (int k = 0; k < K; k++) {
          if (d < best[k]) {
            float further = best[k];
            int behind = row[k];
            best[k] = d;
            row[k] = r;
            d = further;
            r = behind;
          }
        }
      }
    } else {
      float left = to_box(boxes[2 * node], query), right = to_box(boxes[2 * node + 1], query);
      int near = left <= right ? 2 * node : 2 * node + 1;
      float far = fmaxf(left, right);
      if (far < best[K - 1]) {
        stack[top] = near ^ 1;
        apart[top++] = far;
      }
      if (fminf(left, right) < best[K - 1]) {
        node = near;
        continue;
      }
    }
    while (top > 0 && !(apart[top - 1] < best[K - 1])) top--;
    if (top == 0) break;
    node = stack[--top];
  }
  for (int k = 0; k < K; k++) {
    distance[q * K + k] = best[k];
    index[q * K + k] = row[k];
  }
}
#endif

// What is known from earlier rounds: an edge that still leaves its component is still the lightest.
extern "C" __global__ void recall(const int* component, const float* weight, int* other,
                                  uint32* best, long n) {
  long i = thread();
  if (i >= n || other[i] == NONE) return;
  int own = component[i];
  if (component[other[i]] == own)
    other[i] = NONE;
  else if (__float_as_uint(weight[i]) < *(volatile uint32*)&best[own])
    atomicMin(&best[own], __float_as_uint(weight[i]));
}

// The lightest edge of each point that leaves its component, where it could be the component's.
extern "C" __global__ void search(const float2* points, const float* core, const float4* boxes,
                                  const float* least, const int* component, const int* owner,
                                  float* weight, int* other, uint32* best, long n, long leaves) {
  long i = thread();
  if (i >= n || other[i] != NONE) return;
  int own = component[i];
  float2 point = points[i];
  float reach = core[i];
  volatile uint32* shared = &best[own];
  float limit = __uint_as_float(*shared);
  // Whatever it found would be heavier than what the component has.
  if (weight[i] > limit || reach > limit) return;
  float lightest = INFINITE;
  uint64 lightest_ends = ~0ull;
  int found = NONE;
  int stack[STACK], top = 0;
  float bound[STACK];
  int node = 1;
  while (true) {
    if (node >= leaves) {
      limit = fminf(limit, __uint_as_float(*shared));
      long first = (node - leaves) * LEAF;
      for (long j = first; j < n && j < first + LEAF; j++) {
        if (component[j] == own) continue;
        float w = fmaxf(fmaxf(reach, core[j]), squared(point, points[j]));
        if (w < lightest || (w == lightest && ends((int)i, (int)j) < lightest_ends)) {
          lightest = w;
          lightest_ends = ends((int)i, (int)j);
          found = (int)j;
        }
      }
      if (lightest < limit) {
        limit = lightest;
        atomicMin(&best[own], __float_as_uint(lightest));
      }
    } else {
      int near = 2 * node, far = 2 * node + 1;
      float to_near = owner[near] == own ? INFINITE
                      : fmaxf(fmaxf(reach, least[near]), to_box(boxes[near], point));
      float to_far = owner[far] == own ? INFINITE
                     : fmaxf(fmaxf(reach, least[far]), to_box(boxes[far], point));
      if (to_far < to_near) {
        int node_swap = near;
        near = far;
        far = node_swap;
        float swap = to_near;
        to_near = to_far;
        to_far = swap;
      }
      // As far as the limit is not too far: of equally light edges the order decides.
      if (to_far <= limit && to_far < INFINITE) {
        stack[top] = far;
        bound[top++] = to_far;
      }
      if (to_near <= limit && to_near < INFINITE) {
        node = near;
        continue;
      }
    }
    while (top > 0 && bound[top - 1] > limit) top--;
    if (top == 0) break;
    node = stack[--top];
  }
  if (lightest <= limit) {
    weight[i] = lightest;
    other[i] = found;
  } else {
    // The component has a lighter edge, and beyond that nobody looked.
    weight[i] = fmaxf(weight[i], limit);
  }
}

// Of the edges of a component's lowest weight, the first in order.
extern "C" __global__ void choose(const int* component, const float* weight, const int* other,
                                  const uint32* best, uint64* pair, long n) {
  long i = thread();
  if (i >= n || other[i] == NONE) return;
  int own = component[i];
  if (__float_as_uint(weight[i]) != best[own]) return;
  uint64 edge = ends((int)i, other[i]);
  if (edge < *(volatile uint64*)&pair[own]) atomicMin(&pair[own], edge);
}

// Each component joins the one at the other end of its edge; an edge that both chose is kept once.
extern "C" __global__ void join(const int* component, const uint32* best, const uint64* pair,
                                int* parent, uint64* edges, float* weights, uint32* count, long n) {
  long c = thread();
  if (c >= n || component[c] != c || pair[c] == ~0ull) return;
  int a = component[pair[c] >> 32], b = component[pair[c] & 0xffffffffull];
  int there = a == c ? b : a;
  if (pair[there] == pair[c] && c < there) return;
  parent[c] = there;
  uint32 slot = atomicAdd(count, 1u);
  edges[slot] = pair[c];
  weights[slot] = __uint_as_float(best[c]);
}

extern "C" __global__ void shorten(const int* component, int* parent, long n) {
  long c = thread();
  if (c >= n || component[c] != c) return;
  parent[c] = *(volatile int*)&parent[parent[c]];
}

extern "C" __global__ void relabel(int* component, const int* parent, long n) {
  long i = thread();
  if (i < n) component[i] = parent[component[i]];
}
