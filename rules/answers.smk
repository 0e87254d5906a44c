"""Answers by the target model, for sources with the key `answers`.

REQUIRED INPUTS:
    the files of the source
    <model>/config.json, tokenizer and weights

OUTPUTS:
    prompts = results/answers/<source>/prompts.parquet
    chunks = results/answers/<source>/prompts.json
    answers = results/answers/<source>/<model>-<key>/<chunk_id>.parquet
"""


rule answers:
    """
    Have the target model answer, and do nothing else: snakemake --cores all answers
    """
    input:
        all_answers,


if ANSWERED:

    checkpoint prompts:
        """
        Render each row up to what the target model answers, and cut the prompts into chunks.

        The rule is a checkpoint, since only the rows say which chunks there are.
        """
        input:
            files=source_files,
            model=ancient(MODEL / "config.json"),
        output:
            prompts=RESULTS.prompts("{source}"),
            chunks=RESULTS.prompt_chunks("{source}"),
        log:
            RESULTS.log("prompts", "{source}"),
        benchmark:
            RESULTS.benchmark("prompts", "{source}")
        # As many as --cores allows.
        threads: 1024
        params:
            options=prompt_options,
            data=digest_of_data,
            tokenizer=digest_of_tokenizer,
            code=ask.source_digest("answers"),
        shell:
            """
            exec python "$DRAFTSTATES_SCRIPTS/prompts.py" \
                --config "$DRAFTSTATES_CONFIG" \
                --source {wildcards.source:q} \
                --tokenizer "$DRAFTSTATES_MODEL" \
                --output {output.prompts:q} \
                --workers {threads} >{log:q} 2>&1
            """

    rule answer:
        """
        Have the server answer one chunk of prompts.

        The answers depend on the answers' key and on the chunk's prompts alone. So, as with shards,
        this rule makes no file that exists. An answer is in the chunk's journal before it counts as
        finished, so a job that is killed loses none.
        """
        input:
            prompts=ancient(RESULTS.prompts("{source}")),
            chunks=ancient(RESULTS.prompt_chunks("{source}")),
            model=ancient(MODEL / "config.json"),
        output:
            answers=RESULTS.answers("{source}", "{answers_key}") / "{chunk_id}.parquet",
        log:
            RESULTS.log("answers", "{source}", "{answers_key}", "{chunk_id}"),
        benchmark:
            RESULTS.benchmark("answers", "{source}", "{answers_key}", "{chunk_id}")
        wildcard_constraints:
            source=ask.without_present_answers(
                RESULTS.root if workflow.is_main_process else None, ANSWERED
            ),
            chunk_id="[0-9a-f]{32}",
        priority: 1
        # A second attempt, in case the server died: the next lease restarts it.
        retries: 1
        resources:
            streams=1,
        shell:
            """
            exec python "$DRAFTSTATES_SCRIPTS/answers.py" \
                --config "$DRAFTSTATES_CONFIG" \
                --source {wildcards.source:q} \
                --prompts {input.prompts:q} \
                --chunk-id {wildcards.chunk_id:q} \
                --output {output.answers:q} >{log:q} 2>&1
            """
