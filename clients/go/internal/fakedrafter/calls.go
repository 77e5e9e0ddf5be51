package fakedrafter

import (
	"context"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	pb "example.com/specdraft/clients/go/specdraft/v1"
)

// perform does one request, unary or from a stream.
func (s *Service) perform(rpc string, request proto.Message, overDrive bool) (proto.Message, error) {
	if err := s.note(rpc, request, overDrive); err != nil {
		return nil, err
	}
	s.mu.Lock()
	answer, err := s.do(request)
	s.mu.Unlock()
	s.done(rpc, request)
	return answer, err
}

func (s *Service) do(request proto.Message) (proto.Message, error) {
	switch one := request.(type) {
	case *pb.OpenSequenceRequest:
		id, q := s.open(one.OpenId, map[int64]string{})
		return &pb.OpenSequenceResponse{SequenceId: id, State: q.state()}, nil
	case *pb.ProposeRequest:
		answer := &pb.ProposeResponse{}
		for _, entry := range one.Entries {
			answer.Results = append(answer.Results, s.entry(entry.SequenceId, entry.Op, entry.Pairs, entry.DraftCount, entry))
		}
		return answer, nil
	case *pb.CatchupRequest:
		answer := &pb.CatchupResponse{}
		for _, entry := range one.Entries {
			result := s.entry(entry.SequenceId, entry.Op, entry.Pairs, 0, entry)
			answer.Results = append(answer.Results, &pb.CatchupResult{Status: result.Status, State: result.State})
		}
		return answer, nil
	case *pb.FreeKVRequest:
		if s.carries[string(one.KvId)] == nil {
			return nil, &Refusal{codes.NotFound, pb.ErrorReason_ERROR_REASON_CARRY_UNKNOWN}
		}
		delete(s.carries, string(one.KvId))
		return &pb.FreeKVResponse{}, nil
	}
	return s.doToSequence(request)
}

func (s *Service) doToSequence(request proto.Message) (proto.Message, error) {
	q, err := s.find(request.(interface{ GetSequenceId() []byte }).GetSequenceId())
	if err != nil {
		return nil, err
	}
	switch one := request.(type) {
	case *pb.GetSequenceRequest:
		return &pb.GetSequenceResponse{State: q.state()}, nil
	case *pb.ReadDraftsRequest:
		return &pb.ReadDraftsResponse{Drafts: []uint32{7}, Logprobs: []float32{-0.5}}, nil
	case *pb.ForkSequenceRequest:
		rows := map[int64]string{}
		for key, row := range q.rows {
			if key < one.KeepKeysBelow {
				rows[key] = row
			}
		}
		id, forked := s.open(one.OpenId, rows)
		return &pb.ForkSequenceResponse{SequenceId: id, State: forked.state()}, nil
	case *pb.TruncateRequest:
		return numbered(q, one.Op, one, func() (func() *pb.TruncateResponse, error) {
			q.drop(one.FirstKey)
			return func() *pb.TruncateResponse { return &pb.TruncateResponse{State: q.state()} }, nil
		})
	case *pb.TakeKVRequest:
		return numbered(q, one.Op, one, func() (func() *pb.TakeKVResponse, error) {
			carry := &pb.CarryInfo{KvId: newBytes(), Ranges: q.state().Ranges, Label: one.Label}
			s.carries[string(carry.KvId)] = carry
			q.drop(0)
			return func() *pb.TakeKVResponse {
				return &pb.TakeKVResponse{Carry: carry, HeadFingerprint: "00", State: q.state()}
			}, nil
		})
	case *pb.InstallKVRequest:
		return numbered(q, one.Op, one, func() (func() *pb.InstallKVResponse, error) { return s.install(q, one) })
	case *pb.CloseSequenceRequest:
		return numbered(q, one.Op, one, func() (func() *pb.CloseSequenceResponse, error) {
			delete(s.sequences, string(one.SequenceId))
			return func() *pb.CloseSequenceResponse { return &pb.CloseSequenceResponse{} }, nil
		})
	}
	return nil, &Refusal{Code: codes.Unimplemented}
}

func (s *Service) install(q *sequence, request *pb.InstallKVRequest) (func() *pb.InstallKVResponse, error) {
	carry := s.carries[string(request.KvId)]
	if carry == nil {
		return nil, &Refusal{codes.NotFound, pb.ErrorReason_ERROR_REASON_CARRY_UNKNOWN}
	}
	delete(s.carries, string(request.KvId))
	for _, one := range carry.Ranges {
		for key := one.Begin; key < one.End; key++ {
			if request.KeepKeysBelow == nil || key < *request.KeepKeysBelow {
				q.rows[key] = ""
			}
		}
	}
	return func() *pb.InstallKVResponse { return &pb.InstallKVResponse{State: q.state()} }, nil
}

func (s *Service) answerInBand(frame *pb.DriveRequest) *pb.DriveResponse {
	said := &pb.DriveResponse{CorrelationId: frame.CorrelationId}
	rpc, request := unwrap(frame)
	answer, err := s.perform(rpc, request, true)
	if err != nil {
		said.Status = err.(*Refusal).entry()
		return said
	}
	switch one := answer.(type) {
	case *pb.ProposeResponse:
		said.Response = &pb.DriveResponse_Propose{Propose: one}
	case *pb.CatchupResponse:
		said.Response = &pb.DriveResponse_Catchup{Catchup: one}
	case *pb.TruncateResponse:
		said.Response = &pb.DriveResponse_Truncate{Truncate: one}
	case *pb.OpenSequenceResponse:
		said.Response = &pb.DriveResponse_OpenSequence{OpenSequence: one}
	case *pb.CloseSequenceResponse:
		said.Response = &pb.DriveResponse_CloseSequence{CloseSequence: one}
	case *pb.GetSequenceResponse:
		said.Response = &pb.DriveResponse_GetSequence{GetSequence: one}
	case *pb.TakeKVResponse:
		said.Response = &pb.DriveResponse_TakeKv{TakeKv: one}
	case *pb.InstallKVResponse:
		said.Response = &pb.DriveResponse_InstallKv{InstallKv: one}
	case *pb.FreeKVResponse:
		said.Response = &pb.DriveResponse_FreeKv{FreeKv: one}
	case *pb.ForkSequenceResponse:
		said.Response = &pb.DriveResponse_ForkSequence{ForkSequence: one}
	case *pb.ReadDraftsResponse:
		said.Response = &pb.DriveResponse_ReadDrafts{ReadDrafts: one}
	}
	return said
}

// unwrap names the request of a frame by its RPC.
func unwrap(frame *pb.DriveRequest) (string, proto.Message) {
	m := frame.ProtoReflect()
	field := m.WhichOneof(m.Descriptor().Oneofs().ByName("request"))
	request := m.Get(field).Message().Interface()
	name := string(request.ProtoReflect().Descriptor().Name())
	return name[:len(name)-len("Request")], request
}

func unary[Req proto.Message, Resp proto.Message](ctx context.Context, s *Service, rpc string, request Req) (Resp, error) {
	var none Resp
	if err := s.checkToken(ctx); err != nil {
		return none, err
	}
	answer, err := s.perform(rpc, request, false)
	if err != nil {
		return none, err
	}
	return answer.(Resp), nil
}

// Propose is the RPC.
func (s *Service) Propose(ctx context.Context, request *pb.ProposeRequest) (*pb.ProposeResponse, error) {
	return unary[*pb.ProposeRequest, *pb.ProposeResponse](ctx, s, "Propose", request)
}

// Catchup is the RPC.
func (s *Service) Catchup(ctx context.Context, request *pb.CatchupRequest) (*pb.CatchupResponse, error) {
	return unary[*pb.CatchupRequest, *pb.CatchupResponse](ctx, s, "Catchup", request)
}

// Truncate is the RPC.
func (s *Service) Truncate(ctx context.Context, request *pb.TruncateRequest) (*pb.TruncateResponse, error) {
	return unary[*pb.TruncateRequest, *pb.TruncateResponse](ctx, s, "Truncate", request)
}

// OpenSequence is the RPC.
func (s *Service) OpenSequence(ctx context.Context, request *pb.OpenSequenceRequest) (*pb.OpenSequenceResponse, error) {
	return unary[*pb.OpenSequenceRequest, *pb.OpenSequenceResponse](ctx, s, "OpenSequence", request)
}

// CloseSequence is the RPC.
func (s *Service) CloseSequence(ctx context.Context, request *pb.CloseSequenceRequest) (*pb.CloseSequenceResponse, error) {
	return unary[*pb.CloseSequenceRequest, *pb.CloseSequenceResponse](ctx, s, "CloseSequence", request)
}

// GetSequence is the RPC.
func (s *Service) GetSequence(ctx context.Context, request *pb.GetSequenceRequest) (*pb.GetSequenceResponse, error) {
	return unary[*pb.GetSequenceRequest, *pb.GetSequenceResponse](ctx, s, "GetSequence", request)
}
