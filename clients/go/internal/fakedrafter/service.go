// Package fakedrafter is a scripted Drafter for tests and examples: real gRPC over a Unix socket, made-up drafts.
//
// It keeps what a client's tests need of the contract (operation numbers, rows by key, entry statuses, the Drive stream,
// a host arena) and nothing of the drafting. Token 7 is the draft, always.
package fakedrafter

import (
	"context"
	"crypto/tls"
	"net"
	"os"
	"path/filepath"
	"sync"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "example.com/specdraft/clients/go/specdraft/v1"
)

// Width is the hidden width of the fake's head, MaxDrafts and PrefillRows its limits.
const (
	Width       = 8
	MaxDrafts   = 4
	PrefillRows = 16
	Token       = "specdraft-token-bin"
)

// Refusal is an answer other than OK.
type Refusal struct {
	Code   codes.Code
	Reason pb.ErrorReason
}

// Error says the reason's name.
func (r *Refusal) Error() string { return r.Reason.String() }

// GRPCStatus is the refusal of a whole call.
func (r *Refusal) GRPCStatus() *status.Status {
	made := status.New(r.Code, r.Reason.String())
	if r.Reason == 0 {
		return made
	}
	name := r.Reason.String()[len("ERROR_REASON_"):]
	detailed, err := made.WithDetails(&errdetails.ErrorInfo{Domain: "specdraft", Reason: name})
	if err != nil {
		return made
	}
	return detailed
}

func (r *Refusal) entry() *pb.EntryStatus {
	return &pb.EntryStatus{Code: int32(r.Code), Reason: r.Reason, Message: r.Reason.String()}
}

// Options say what the fake serves.
type Options struct {
	HostMemory bool
	NoDrive    bool
	LeaseMs    uint32
	GraceMs    uint32
	// TLS makes it listen on TCP instead of a Unix socket.
	TLS *tls.Config
	// Device is where arenas of MEMORY_KIND_CUDA come from.
	Device *DeviceMemory
}

// DeviceMemory exports memory of a fake GPU.
type DeviceMemory struct {
	UUID   [16]byte
	Export func(size int) (handle [64]byte, data []byte)
}

// Service is a running fake.
type Service struct {
	pb.UnimplementedDrafterServer

	// Before is called with every request of a session, and its error answers it. After is called once it is done.
	Before, After func(rpc string, request proto.Message) error

	options   Options
	directory string
	target    string
	server    *grpc.Server
	side      *sideSocket

	mu        sync.Mutex
	calls     []Call
	token     []byte
	sequences map[string]*sequence
	carries   map[string]*pb.CarryInfo
	opened    map[string]string
	streams   map[int]context.CancelCauseFunc
	lastID    int
}

// Call is a request that came.
type Call struct {
	RPC       string
	OverDrive bool
	Request   proto.Message
}

// Start serves on a socket in a directory of its own.
func Start(options Options) (*Service, error) {
	directory, err := os.MkdirTemp("", "sd-")
	if err != nil {
		return nil, err
	}
	if options.LeaseMs == 0 {
		options.LeaseMs = 30_000
	}
	if options.GraceMs == 0 {
		options.GraceMs = 5_000
	}
	made := &Service{
		options:   options,
		directory: directory,
		sequences: map[string]*sequence{},
		carries:   map[string]*pb.CarryInfo{},
		opened:    map[string]string{},
		streams:   map[int]context.CancelCauseFunc{},
	}
	return made, made.Listen()
}

// Listen serves, for the first time or again after Stop.
func (s *Service) Listen() error {
	network, address, options := "unix", filepath.Join(s.directory, "s.sock"), []grpc.ServerOption(nil)
	if s.options.TLS != nil {
		network, address = "tcp", "127.0.0.1:0"
		options = append(options, grpc.Creds(credentials.NewTLS(s.options.TLS)))
	}
	listener, err := net.Listen(network, address)
	if err != nil {
		return err
	}
	s.target = "unix://" + address
	if network == "tcp" {
		s.target = listener.Addr().String()
	}
	if s.side, err = listenSide(filepath.Join(s.directory, "s.sock.fd")); err != nil {
		return err
	}
	s.server = grpc.NewServer(options...)
	pb.RegisterDrafterServer(s.server, s)
	go func(server *grpc.Server) { _ = server.Serve(listener) }(s.server) // it ends with Stop
	return nil
}

// Target is the address for Dial.
func (s *Service) Target() string { return s.target }

// Stop breaks every connection and listens no more.
func (s *Service) Stop() {
	s.server.Stop()
	s.side.close()
}

// Close ends the service.
func (s *Service) Close() {
	s.Stop()
	_ = os.RemoveAll(s.directory) // a temporary directory
}

// Cut ends every open stream, with this error or, for nil, as if the connection had broken.
func (s *Service) Cut(err error) {
	if err == nil {
		err = &Refusal{Code: codes.Unavailable}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, cancel := range s.streams {
		cancel(err)
		delete(s.streams, id)
	}
}

// Restart forgets every session, as a restarted service has.
func (s *Service) Restart() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.token, s.sequences = nil, map[string]*sequence{}
}

// Calls are the requests of one RPC that came.
func (s *Service) Calls(rpc string) []Call {
	s.mu.Lock()
	defer s.mu.Unlock()
	var found []Call
	for _, one := range s.calls {
		if one.RPC == rpc {
			found = append(found, one)
		}
	}
	return found
}

// StreamCount is the number of open streams.
func (s *Service) StreamCount() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.streams)
}

// SequenceCount is the number of open sequences.
func (s *Service) SequenceCount() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.sequences)
}

// Carries are the carries that have not been given up.
func (s *Service) Carries() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.carries)
}

// Rows are the hidden rows of a sequence by key.
func (s *Service) Rows(id []byte) map[int64]string {
	s.mu.Lock()
	defer s.mu.Unlock()
	found := map[int64]string{}
	for key, row := range s.sequences[string(id)].rows {
		found[key] = row
	}
	return found
}

// Drive serves the stream.
func (s *Service) Drive(stream pb.Drafter_DriveServer) error {
	if s.options.NoDrive {
		return status.Error(codes.Unimplemented, "no Drive here")
	}
	if err := s.checkToken(stream.Context()); err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(stream.Context())
	defer cancel(nil)
	s.mu.Lock()
	s.lastID++
	id := s.lastID
	s.streams[id] = cancel
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.streams, id)
	}()
	if err := stream.SendHeader(metadata.MD{}); err != nil {
		return err
	}
	failed := make(chan error, 1)
	go func() { failed <- s.answerAll(ctx, stream) }()
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (s *Service) answerAll(ctx context.Context, stream pb.Drafter_DriveServer) error {
	for {
		request, err := stream.Recv()
		if err != nil {
			return err
		}
		answer := s.answerInBand(request)
		if ctx.Err() != nil {
			return nil // cut: the answer is lost
		}
		if err := stream.Send(answer); err != nil {
			return err
		}
	}
}

func (s *Service) checkToken(ctx context.Context) error {
	given, _ := metadata.FromIncomingContext(ctx)
	s.mu.Lock()
	defer s.mu.Unlock()
	if values := given.Get(Token); len(values) != 1 || len(s.token) == 0 || values[0] != string(s.token) {
		return &Refusal{codes.NotFound, pb.ErrorReason_ERROR_REASON_SESSION_UNKNOWN}
	}
	return nil
}

func (s *Service) note(rpc string, request proto.Message, overDrive bool) error {
	s.mu.Lock()
	s.calls = append(s.calls, Call{rpc, overDrive, proto.Clone(request)})
	before := s.Before
	s.mu.Unlock()
	if before == nil {
		return nil
	}
	return before(rpc, request)
}

func (s *Service) done(rpc string, request proto.Message) {
	s.mu.Lock()
	after := s.After
	s.mu.Unlock()
	if after != nil {
		_ = after(rpc, request) // what it returns has no meaning here
	}
}

// Script sets Before and After while the service runs.
func (s *Service) Script(before, after func(rpc string, request proto.Message) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.Before, s.After = before, after
}
