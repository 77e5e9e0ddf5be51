package main

import (
	"sync/atomic"
	"time"
	_ "unsafe" // for go:linkname

	_ "google.golang.org/grpc" // brings the variable below
)

// grpcLeastPing is gRPC's own least time between two pings of a client. A test that waits for several pings lowers it in
// this process.
//
//go:linkname grpcLeastPing google.golang.org/grpc/internal.KeepaliveMinPingTime
var grpcLeastPing time.Duration

var pingsAreShort atomic.Bool

func allowShortPings() {
	if pingsAreShort.CompareAndSwap(false, true) {
		grpcLeastPing = 10 * time.Millisecond
	}
}
