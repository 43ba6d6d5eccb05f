#!/bin/sh
# Put llama.cpp 0.5.0 into the folder $1: its source, its libraries as node-llama-cpp builds them, and the program of the tests.
set -eu
version=3.22.1
program=$(realpath "$(dirname "$0")/llamacpp_chain.cpp")
rm -rf "$1"
mkdir -p "$1/lib"
cd "$1"
npm pack --silent node-llama-cpp@$version @node-llama-cpp/linux-x64@$version
tar xzf node-llama-cpp-$version.tgz package/llama/gitRelease.bundle
git -c advice.detachedHead=false clone --quiet package/llama/gitRelease.bundle source
tar xzf node-llama-cpp-linux-x64-$version.tgz -C lib --strip-components=3 --wildcards '*.so'
g++ -O1 -std=c++17 -Isource/common -Isource/include -Isource/ggml/include -Isource/vendor "$program" -o lib/chain -Llib \
    -l:libllama-common.so -l:libllama.v0.5.0.so -l:libggml.v0.5.0.so -l:libggml-base.so -Wl,-rpath,'$ORIGIN'
rm -rf package ./*.tgz
