// The kernels' own threads. Not OpenMP: torch brings one OpenMP runtime, and a second in the process fights it for
// cores.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

namespace infinity::adam {

// Calls task(0) .. task(count - 1), each once, on the calling thread and the pool's, and returns when all are done.
// Safe to call from several threads: one at a time gets the pool, the others do their tasks alone meanwhile.
void parallel_for(size_t count, const std::function<void(size_t)>& task);

// Threads that one parallel_for uses, the caller among them. At first: the CPUs that this process may run on.
int thread_count();
void set_thread_count(int count);

// CPUs that the pool's threads run on from the next parallel_for on; none for all that the process may run on.
std::vector<int> cpus();
void set_cpus(std::vector<int> cpus);

} // namespace infinity::adam
