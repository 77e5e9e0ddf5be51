package specdraft

import (
	"context"
	"errors"
	"net"
	"os"
	"strings"
	"syscall"
	"time"
)

const probeTimeout = 250 * time.Millisecond

// isRefused asks the kernel whether a connection to a target is refused for certain: gRPC itself answers from its
// back-off for a while. Everything else may come right.
func isRefused(ctx context.Context, target string) bool {
	network, address := "unix", socketPath(target)
	if address == "" {
		network, address = "tcp", strings.TrimPrefix(target, "passthrough:///")
		if _, _, err := net.SplitHostPort(address); err != nil {
			return false
		}
	}
	dialer := net.Dialer{Timeout: probeTimeout}
	conn, err := dialer.DialContext(ctx, network, address)
	if err != nil {
		return errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, os.ErrNotExist)
	}
	_ = conn.Close() // nothing was sent
	return false
}

// socketPath is the path of a Unix socket's target; empty for any other.
func socketPath(target string) string {
	rest, found := strings.CutPrefix(target, "unix:")
	if !found {
		return ""
	}
	if strings.HasPrefix(rest, "///") {
		return strings.TrimPrefix(rest, "//")
	}
	return rest
}
