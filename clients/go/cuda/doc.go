// Package cuda lets hidden rows go through a GPU's memory, without cgo: it loads libcuda.so.1 at run time.
//
// Open finds the target's GPU by its UUID. The Device that it returns goes into specdraft.SessionOptions together with
// Memory: specdraft.MemoryCUDA; the session's arena is then opened through its CUDA IPC handle and rows are copied into it.
//
// Stream and Page are the pieces of device-ordered rounds: a counter in a host page that the GPU sees, which a stream
// writes and waits for.
//
// The package is tested with a fake driver, with a stand-in for libcuda that checks how arguments arrive, and, where there
// is one, on a GPU (gpu_test.go).
package cuda
