// Standard headers, short type names and printf into a string, for every part of the core.
#pragma once

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <array>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))
typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef std::string Str;

static Str __attribute__((format(printf, 1, 2))) fmt(const char* f, ...) {
  va_list ap, again;
  va_start(ap, f);
  va_copy(again, ap);
  Str s(vsnprintf(nullptr, 0, f, ap), 0);
  vsnprintf(&s[0], s.size() + 1, f, again);
  va_end(again);
  va_end(ap);
  return s;
}
