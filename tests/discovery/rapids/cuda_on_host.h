// CUDA for a compiler without it: a kernel of independent threads is a loop over them.
//
// atomicMin and the like need no more than their meaning, since one thread runs after the other.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __global__
#define __forceinline__ inline

struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct Place {
  long x;
};
static Place blockIdx, blockDim = {1}, threadIdx;

static inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
static inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
template <typename T>
static T atomicMin(T* place, T value) {
  T before = *place;
  if (value < before) *place = value;
  return before;
}
template <typename T>
static T atomicAdd(T* place, T value) {
  T before = *place;
  *place += value;
  return before;
}

