// Greedy answers from llama.cpp's own speculative decoding, counted by depth.
//
// Takes llama.cpp's common options (--model, --model-draft, --spec-type, ...; without a draft: plain decoding). Reads one
// prompt a line: the number of tokens to write, then the prompt's ids. Writes the answer's ids, one line a prompt, a "|" before
// those of each round, the prompt's own as soon as it is known, and at last
// "counts ROUNDS N1 N2 ...": the rounds that verified a draft, and in how many of them the first 1, 2, ... drafts were accepted.

#include "arg.h"
#include "common.h"
#include "speculative.h"

#include <algorithm>
#include <iostream>
#include <sstream>

static llama_token best(llama_context * ctx, int place) {
    const float * logits = llama_get_logits_ith(ctx, place);
    const int size = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
    return llama_token(std::max_element(logits, logits + size) - logits);
}

static void forget(llama_context * ctx, llama_pos from) {
    if (ctx != nullptr) {
        llama_memory_seq_rm(llama_get_memory(ctx), 0, from, -1);
    }
}

// Decode `tokens` at positions `from`, ..., and show the drafter what the target made of them.
static void read(llama_context * target, common_speculative * drafter, llama_batch & batch, const llama_tokens & tokens, llama_pos from) {
    common_batch_clear(batch);
    for (size_t i = 0; i < tokens.size(); i++) {
        common_batch_add(batch, tokens[i], from + llama_pos(i), { 0 }, true);
    }
    if (llama_decode(target, batch) != 0 || (drafter != nullptr && !common_speculative_process(drafter, batch))) {
        throw std::runtime_error("llama.cpp could not decode");
    }
}

int main(int argc, char ** argv) {
    common_params params;
    common_init();
    if (!common_params_parse(argc, argv, params, LLAMA_EXAMPLE_SPECULATIVE)) {
        return 1;
    }
    params.n_outputs_max = params.n_outputs_max_per_seq = params.n_batch;
    llama_backend_init();
    const auto loaded = common_init_from_params(params);
    llama_context * target = loaded->context();
    const llama_vocab * vocab = llama_model_get_vocab(loaded->model());

    llama_context * draft_context = nullptr;
    common_speculative_init_result_ptr draft_loaded;
    common_speculative_ptr drafter;
    if (params.speculative.has_dft()) {
        common_params draft_params = common_base_params_to_speculative(params);
        draft_loaded = common_speculative_init_from_params(draft_params, loaded->model(), target);
        draft_context = draft_loaded->context();
        if (draft_context == nullptr) {  // llama.cpp has said why
            return 1;
        }
        params.speculative.draft.ctx_tgt = target;
        params.speculative.draft.ctx_dft = draft_context;
        drafter.reset(common_speculative_init(params.speculative, 1));
    }
    const int depth = params.speculative.draft.n_max;
    long rounds = 0;
    std::vector<long> accepted(depth, 0);
    llama_batch batch = llama_batch_init(params.n_batch, 0, 1);

    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream words(line);
        size_t limit = 0;
        words >> limit;
        llama_tokens text;
        for (llama_token id; words >> id;) {
            text.push_back(id);
        }
        const size_t length = text.size();
        forget(target, 0);
        forget(draft_context, 0);
        read(target, drafter.get(), batch, text, 0);
        if (drafter) {
            common_speculative_begin(drafter.get(), 0, text);
        }
        llama_token last = best(target, int(length) - 1);
        bool ended = false;
        const auto emit = [&](llama_token token) {
            std::cout << token << ' ';
            ended = llama_vocab_is_eog(vocab, token) || text.size() + 1 - length >= limit;
        };
        emit(last);
        std::cout << std::flush;
        while (!ended) {
            std::cout << "| ";
            llama_tokens drafts;
            if (drafter) {
                common_speculative_get_draft_params(drafter.get(), 0) = { true, depth, llama_pos(text.size()), last, &text, &drafts };
                common_speculative_draft(drafter.get());
                forget(draft_context, llama_pos(text.size()));
            }
            llama_tokens tokens = { last };
            tokens.insert(tokens.end(), drafts.begin(), drafts.end());
            read(target, drafter.get(), batch, tokens, llama_pos(text.size()));
            size_t right = 0;
            while (right < drafts.size() && best(target, int(right)) == drafts[right]) {
                accepted[right++]++;
            }
            rounds += !drafts.empty();
            const llama_token bonus = best(target, int(right));
            for (size_t i = 0; i <= right && !ended; i++) {
                text.push_back(last);
                last = i < right ? drafts[i] : bonus;
                emit(last);
            }
            if (drafter) {
                common_speculative_accept(drafter.get(), 0, uint16_t(right));
            }
            forget(target, llama_pos(text.size()));
            forget(draft_context, llama_pos(text.size()));
        }
        std::cout << std::endl;
    }
    std::cout << "counts " << rounds;
    for (const long count : accepted) {
        std::cout << ' ' << count;
    }
    std::cout << std::endl;
}
