package specdraft

import (
	"testing"

	"go.uber.org/goleak"
)

// A goroutine that outlives the tests fails them.
func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }
