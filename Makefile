.DEFAULT_GOAL := help
VERBS := up down status restart-engine release load doctor test test-gpu bench-map bench-edit recovery clean images model venv lock
.PHONY: help $(VERBS)

help:  ## this list
	@sed -n 's/^\([a-z -]*\):.*## /\1\t/p' Makefile | expand -t 18

up:  ## install what is missing, build, start, and ask the model a question
down:  ## stop; the named volumes stay
status:  ## what is held, by whom, and the last restart
restart-engine:  ## a new server for the engine, and where the seconds went
release:  ## stop the engine and give the weights' memory back
load:  ## load what engine.yaml names now, and start the engine on it
doctor:  ## what a container here can do with shared memory, and why not
test:  ## everything that can run on this machine
test-gpu:  ## the tests on a GPU, with the vLLM for CUDA that is there; ARGS='-k tokens'
bench-map:  ## milliseconds to map weights, by their size; ARGS=--cuda on a GPU
bench-edit:  ## save a file → the supervisor's decision → the new server healthy; ARGS='-n 20'
recovery:  ## lose the engine in every way while an agent works, and check its job; restarts alone: ARGS=--no-agent
clean:  ## remove containers, volumes, images, .work and .venv
images:  ## build the images
model:  ## write the default model to .work/models
venv:  ## make .venv for the tests
lock:  ## write the pinned package lists again

$(VERBS):
	@scripts/$@ $(ARGS)
