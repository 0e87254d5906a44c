"""Capture of shards that stay on the disk in a compact form.

With the key `storage`, this rule takes the place of `extract` and `verify`.

REQUIRED INPUTS:
    plan, tokens, server, parity: see rules/extract.smk

OUTPUTS:
    compact = results/<capture>/compact/<form>/<shard_id>.safetensors
    stored = results/<capture>/compact/<form>/<shard_id>.json
    and, beside them, results/<capture>/shards/<shard_id>.receipts.json and
        results/<capture>/verified/<shard_id>.json
"""


rule compact:
    """
    Capture a shard, verify it, make its compact form, and remove the captured file.

    The three steps are one job, so that the disk holds no more captured files than jobs run: with
    jobs of their own, the scheduler would let captures run ahead. A captured file that an earlier
    run has left is not captured again. Like `extract`, this rule never makes a shard that exists;
    what vouches for it is a parameter, so that the shard is made again without it.
    """
    input:
        plan=ancient(RESULTS.plan),
        tokens=ancient(shard_tokens),
        server=ancient(CAPTURE.server),
        parity=ancient(parity_first),
        model=ancient(MODEL / "config.json"),
    output:
        compact=CAPTURE.compact("{shard_id}", FORM),
        stored=CAPTURE.stored("{shard_id}", FORM),
    log:
        extract=RESULTS.log("{capture}", "extract", "{shard_id}"),
        verify=RESULTS.log("{capture}", "verify", "{shard_id}"),
        compact=RESULTS.log("{capture}", "compact", "{shard_id}"),
    benchmark:
        RESULTS.benchmark("{capture}", "compact", "{shard_id}")
    wildcard_constraints:
        capture=(
            ask.captures_without_present_shards(RESULTS.root, FORM)
            if workflow.is_main_process
            else ask.ANY_CAPTURE
        ),
    priority: 1
    # A second attempt, in case the server died: the next lease restarts it.
    retries: 1
    resources:
        streams=1,
    params:
        shard=str(CAPTURE.shard("{shard_id}")),
        recaptures=str(CAPTURE.recaptures("{shard_id}")),
        receipts=str(CAPTURE.receipts("{shard_id}")),
        verified=str(CAPTURE.verified("{shard_id}")),
        sampled=sampled_option,
        vouched=is_vouched_for,
    shell:
        """
        : >{log.extract:q}
        : >{log.verify:q}
        if ! [ -e {params.shard:q} -a -e {params.recaptures:q} -a -e {params.receipts:q} ]; then
            python "$DRAFTSTATES_SCRIPTS/extract.py" \
                --config "$DRAFTSTATES_CONFIG" \
                --plan {input.plan:q} \
                --shard-id {wildcards.shard_id:q} \
                --tokens {input.tokens:q} \
                --output {params.shard:q} >{log.extract:q} 2>&1
        fi
        python "$DRAFTSTATES_SCRIPTS/verify.py" \
            --plan {input.plan:q} \
            --shard-id {wildcards.shard_id:q} \
            --model "$DRAFTSTATES_MODEL" \
            --shard {params.shard:q} \
            --recaptures {params.recaptures:q} \
            --receipts {params.receipts:q} \
            --threads {threads} {params.sampled} \
            --output {params.verified:q} >{log.verify:q} 2>&1
        exec python "$DRAFTSTATES_SCRIPTS/store.py" \
            --config "$DRAFTSTATES_CONFIG" \
            --plan {input.plan:q} \
            --shard-id {wildcards.shard_id:q} \
            --model "$DRAFTSTATES_MODEL" \
            --shard {params.shard:q} \
            --verified {params.verified:q} \
            --threads {threads} \
            --output {output.compact:q} \
            --record {output.stored:q} >{log.compact:q} 2>&1
        """
