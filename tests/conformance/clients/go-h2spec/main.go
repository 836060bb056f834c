// The cases of h2spec, https://github.com/summerwind/h2spec. Called with HOST PORT; prints their results.
package main

import (
	"os"
	"strconv"
	"time"

	"github.com/summerwind/h2spec"
	"github.com/summerwind/h2spec/config"
)

func main() {
	port, _ := strconv.Atoi(os.Args[2])
	h2spec.Run(&config.Config{
		Host: os.Args[1], Port: port, Path: "/", Timeout: 10 * time.Second, MaxHeaderLen: 4000,
	})
}
