package specdraft

import (
	"math"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
)

const (
	defaultTimeout = 5 * time.Second

	// Pings only while a call is open, and rarer than any server's minimum (gRPC's default is one in 5 minutes without
	// data, the service allows one in 10 s): a ping too many makes a server end the connection.
	keepaliveTime    = 60 * time.Second
	keepaliveTimeout = 10 * time.Second

	// A service that restarts on the same host is back within moments: gRPC's own first back-off is one second.
	firstReconnectDelay = 100 * time.Millisecond
	mostReconnectDelay  = 2 * time.Second
	reconnectJitter     = 0.2
	// gRPC looks again after so long at the latest, and tells the last failure until then.
	reconnectedWithin = time.Duration((1 + reconnectJitter) * float64(mostReconnectDelay))

	defaultCarriesMax     = 256
	defaultCarryTokensMax = 1 << 22
)

// Option is a setting of Dial.
type Option func(*dialSettings)

type dialSettings struct {
	timeout     time.Duration
	credentials credentials.TransportCredentials
	keepalive   keepalive.ClientParameters
	more        []grpc.DialOption
}

// WithTimeout sets the deadline of every RPC; a context that ends earlier wins. The default is 5 s. A method that needs
// several RPCs (a long prompt, finding out where a sequence stands after a timeout) may take that many times as long.
func WithTimeout(timeout time.Duration) Option {
	return func(s *dialSettings) { s.timeout = timeout }
}

// WithTransportCredentials sets the credentials for TCP; the default is a plaintext connection, for Unix sockets.
func WithTransportCredentials(creds credentials.TransportCredentials) Option {
	return func(s *dialSettings) { s.credentials = creds }
}

// WithKeepalive replaces the pings that this client sends (one in 60 s while a call is open). The service ends
// connections that ping more often than once in 10 s; gRPC does not go below 10 s itself.
func WithKeepalive(parameters keepalive.ClientParameters) Option {
	return func(s *dialSettings) { s.keepalive = parameters }
}

// WithDialOptions adds options of gRPC's, after those of this client.
func WithDialOptions(options ...grpc.DialOption) Option {
	return func(s *dialSettings) { s.more = append(s.more, options...) }
}

func readOptions(options []Option) dialSettings {
	settings := dialSettings{
		timeout:     defaultTimeout,
		credentials: insecure.NewCredentials(),
		keepalive:   keepalive.ClientParameters{Time: keepaliveTime, Timeout: keepaliveTimeout},
	}
	for _, option := range options {
		option(&settings)
	}
	return settings
}

func (s dialSettings) grpcOptions() []grpc.DialOption {
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(s.credentials),
		grpc.WithKeepaliveParams(s.keepalive),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{BaseDelay: firstReconnectDelay, Multiplier: 1.6, Jitter: reconnectJitter, MaxDelay: mostReconnectDelay},
			// How long an attempt may take; it has nothing to do with the pause before the next.
			MinConnectTimeout: keepaliveTimeout,
		}),
		// Sending is not limited here: the service refuses what is too large, and requests are cut to its limit. Answers
		// are small; a limit here could only lose one.
		grpc.WithDefaultCallOptions(grpc.MaxCallSendMsgSize(math.MaxInt32), grpc.MaxCallRecvMsgSize(math.MaxInt32)),
		grpc.WithDisableServiceConfig(),
		// Proxies of the environment are not meant for a socket on the same host.
		grpc.WithNoProxy(),
	}
	return append(options, s.more...)
}

// SessionOptions is what a client asks of its session. The zero value is fine for a target that hands over post-norm
// float32 hidden states of the head's own width.
type SessionOptions struct {
	// HiddenSource says which hidden state the target hands over; 0 = PostNorm.
	HiddenSource HiddenSource
	// HiddenDType is its element type, Float32 or BFloat16; 0 = Float32.
	HiddenDType DType
	// HiddenWidth is the number of elements of one hidden row; 0 = the head's own.
	HiddenWidth int
	// LayerIDs are, for Layers, the layers, 0-based.
	LayerIDs []uint32
	// VocabSize is the target's, to be compared with the head's; 0 = not compared.
	VocabSize int
	// Memory is MemoryHost, MemoryInline or MemoryCUDA; 0 = host memory on a Unix socket of the same host if the service
	// grants it, else inline. Session.MemoryKind tells which.
	Memory MemoryKind
	// Device imports the arena of MemoryCUDA; the package cuda has one.
	Device Device
	// Slots are the arena's: sequences that draft at the same time without falling back to inline rows; 0 = 1.
	Slots int
	// MaxDrafts is the most drafts that will be asked for; 0 = the service's limit.
	MaxDrafts int
	// PrefillRows are the rows of the arena's staging area; 0 = the service's limit.
	PrefillRows int
	// WithMasks makes room for grammar masks in shared memory; without it they travel inside the messages.
	WithMasks bool
	// ClientName is free text of at most 64 bytes for the service's listings.
	ClientName string
	// CarryKey is a secret of 16 to 64 bytes under which carries outlive the session; empty = they end with it.
	CarryKey []byte
	// CarriesMax and CarryTokensMax bound what Park remembers, 4 bytes a token; 0 = 256 and 4,194,304, negative = nothing.
	CarriesMax, CarryTokensMax int
	// Unary leaves the Drive stream out: every call is a unary one.
	Unary bool
}

// filled is the options with their defaults. It refuses what can be refused without the service.
func (o SessionOptions) filled() (SessionOptions, error) {
	if o.HiddenSource == 0 {
		o.HiddenSource = PostNorm
	}
	if o.HiddenDType == 0 {
		o.HiddenDType = Float32
	}
	if elementSize(o.HiddenDType) == 0 {
		return o, argumentError("hidden type %v is neither float32 nor bfloat16", o.HiddenDType)
	}
	if o.Memory == MemoryCUDA && o.Device == nil {
		return o, argumentError("MemoryCUDA needs a Device")
	}
	for _, count := range []int{o.HiddenWidth, o.VocabSize, o.Slots, o.MaxDrafts, o.PrefillRows} {
		if count < 0 || count > math.MaxInt32 {
			return o, argumentError("a count of %d", count)
		}
	}
	o.Slots = max(o.Slots, 1)
	o.CarriesMax = limitOr(o.CarriesMax, defaultCarriesMax)
	o.CarryTokensMax = limitOr(o.CarryTokensMax, defaultCarryTokensMax)
	return o, nil
}

func limitOr(given, otherwise int) int {
	if given == 0 {
		return otherwise
	}
	return max(given, 0)
}
