// Command podsecurity holds pods to the Pod Security Standards, with the code of the admission plugin itself.
//
// It reads a JSON array of objects {"name", "metadata", "spec"} (the pod templates) from standard input and writes one
// line for each rule of the level that one of them breaks. Exit code 1 means that something was broken.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/pod-security-admission/api"
	"k8s.io/pod-security-admission/policy"
)

type pod struct {
	Name     string            `json:"name"`
	Metadata metav1.ObjectMeta `json:"metadata"`
	Spec     corev1.PodSpec    `json:"spec"`
}

func main() {
	level := flag.String("level", string(api.LevelRestricted), "privileged, baseline or restricted")
	flag.Parse()
	broken, err := check(api.Level(*level))
	if err != nil {
		fmt.Fprintln(os.Stderr, "podsecurity:", err)
		os.Exit(2)
	}
	if broken {
		os.Exit(1)
	}
}

func check(level api.Level) (bool, error) {
	var pods []pod
	if err := json.NewDecoder(os.Stdin).Decode(&pods); err != nil {
		return false, err
	}
	evaluator, err := policy.NewEvaluator(policy.DefaultChecks(), nil)
	if err != nil {
		return false, err
	}
	broken := false
	for _, item := range pods {
		for _, result := range evaluator.EvaluatePod(api.LevelVersion{Level: level, Version: api.LatestVersion()}, &item.Metadata, &item.Spec) {
			if !result.Allowed {
				broken = true
				fmt.Printf("%s: %s: %s\n", item.Name, result.ForbiddenReason, result.ForbiddenDetail)
			}
		}
	}
	return broken, nil
}
