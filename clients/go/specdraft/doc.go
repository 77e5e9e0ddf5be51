// Package specdraft is the Go client of specdraft, the drafting half of speculative decoding as a gRPC service.
//
// The client is not written yet: sessions, leases, retries and shared memory come later. The messages and the gRPC stubs
// are ready in example.com/specdraft/clients/go/specdraft/v1, generated from the same protos as the Python client's.
package specdraft
