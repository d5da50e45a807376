// The kernels' own threads. Not OpenMP: torch has an OpenMP runtime, and a second one in the process would compete with
// it for cores.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

namespace infinity::adam {

// Calls task(0) .. task(count - 1), each once, on the calling thread and the pool's, and returns when all are done.
// Thread-safe: one caller at a time gets the pool; the others run their tasks without it.
void parallel_for(size_t count, const std::function<void(size_t)>& task);

// The number of threads of one parallel_for, including the caller. Initially the number of CPUs of this process.
int thread_count();
void set_thread_count(int count);

// The CPUs that the pool's threads run on, from the next parallel_for on; empty for all CPUs of the process.
std::vector<int> cpus();
void set_cpus(std::vector<int> cpus);

} // namespace infinity::adam
