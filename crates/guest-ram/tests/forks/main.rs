//! Copy-on-write in a tree of processes, as checkpoints and forks of machines make it
//! (docs/checkpoints.md), compared with a model: machines with memory of their own, which is copied
//! when they are forked.
//!
//! The test starts a machine, a program of its own with one thread (this one, with variables in its
//! environment), and sends commands to it and to all processes that are forked from it. Only
//! commands that read something have an answer that is waited for. So these processes write and
//! discard at the same time, and are killed in the middle of it. The model does not depend on which
//! of them is faster.
//!
//! `PROPTEST_CASES=5000` makes a long run. A failure prints its seed, for `PROPTEST_RNG_SEED`, and
//! the smallest case that was found, for `EBB_FORKS_CASE`; one that needs a certain order of events
//! may have to be repeated often (`EBB_FORKS_REPEAT`). No process outlives the test: each one ends
//! when its socket is closed.

#![allow(clippy::unwrap_used, reason = "a test")]

mod link;
mod memory;
mod operations;
mod process;
mod tree;

use std::cell::RefCell;
use std::hash::{BuildHasher, RandomState};

use libtest_mimic::{Arguments, Failed, Trial};
use proptest::test_runner::{Config, RngSeed, TestCaseError, TestError, TestRunner};

use operations::{Case, Flaw, case};
use tree::{Counts, Violation};

/// Cases of an ordinary run, and the most operations of each.
const CASES: u32 = 64;
const OPERATIONS: usize = 100;

/// A case as it was printed.
const CASE: &str = "EBB_FORKS_CASE";
const REPEAT: &str = "EBB_FORKS_REPEAT";

fn main() {
    process::run_if_asked();
    // Processes whose parent was killed get this one.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid())).unwrap();
    let arguments = Arguments::from_args();
    let found = |name: &str, flaw, is_expected: fn(&Violation) -> bool| {
        Trial::test(name, move || finds(flaw, is_expected))
    };
    let is_content = |violation: &Violation| {
        matches!(
            violation,
            Violation::Content { .. } | Violation::Image { .. } | Violation::Populated { .. }
        )
    };
    let is_silent = |violation: &Violation| matches!(violation, Violation::Silent { .. });
    let trials = vec![
        Trial::test("each_process_has_the_memory_that_it_wrote", holds),
        found("memory_of_a_file_is_found", Flaw::SharedFile, is_content),
        found("files_of_the_parent_are_found", Flaw::FilesOfParent, is_content),
        found("discards_to_an_image_are_found", Flaw::DiscardToImage, is_content),
        found("a_lock_that_is_never_released_is_found", Flaw::NotStill, is_silent),
    ];
    libtest_mimic::run(&arguments, trials).exit();
}

/// Memory is as the model says, or the process that was to answer is not there.
fn holds() -> Result<(), Failed> {
    if let Ok(case) = std::env::var(CASE) {
        return repeat(&serde_json::from_str(&case)?);
    }
    let mut config = config();
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = CASES;
    }
    config.max_shrink_iters = 2000;
    config.max_shrink_time = 60_000;
    let (cases, seed) = (config.cases, config.rng_seed);
    let (result, counts) = search(Flaw::None, config);
    match result {
        Ok(()) => println!("{cases} cases: {counts:?}"),
        Err((violation, case)) => {
            let repeated = serde_json::to_string(&case)?;
            let case = describe(&case);
            let message =
                format!("{violation}\n{case}PROPTEST_RNG_SEED={seed}\n{CASE}='{repeated}'");
            return Err(message.into());
        }
    }
    let all = [
        counts.checkpoints,
        counts.machines,
        counts.kills,
        counts.kills_after_fork,
        counts.images,
        counts.checks,
    ];
    if cases >= CASES && all.contains(&0) {
        return Err(format!("something has never happened: {counts:?}").into());
    }
    Ok(())
}

/// A line for each operation, with its number.
fn describe(case: &Case) -> String {
    let operations = case.operations.iter().enumerate();
    let lines = operations.map(|(index, operation)| format!("{index:3} {operation:?}\n"));
    std::iter::once(format!("{:?}\n", case.setup)).chain(lines).collect()
}

/// A case that has failed before.
fn repeat(case: &Case) -> Result<(), Failed> {
    let times = std::env::var(REPEAT).map_or(Ok(1), |times| times.parse())?;
    for time in 0..times {
        let (_, result) = tree::run(case);
        result.map_err(|violation| format!("the {time}th time: {violation}"))?;
    }
    Ok(())
}

/// The model finds a deliberate mistake.
fn finds(flaw: Flaw, is_expected: fn(&Violation) -> bool) -> Result<(), Failed> {
    // It need not be small, but shows that cases become so. One that waits takes long.
    let max_shrink_iters = if flaw == Flaw::NotStill { 0 } else { 48 };
    let config = Config { cases: CASES, max_shrink_iters, ..config() };
    let seed = config.rng_seed;
    let (result, counts) = search(flaw, config);
    match result {
        Ok(()) => Err(format!("not found with the seed {seed}: {counts:?}").into()),
        Err((violation, case)) if is_expected(&violation) => {
            println!("found in {} operations: {violation}", case.operations.len());
            Ok(())
        }
        Err((violation, case)) => {
            Err(format!("something else: {violation}\n{}", describe(&case)).into())
        }
    }
}

fn config() -> Config {
    let config = Config { failure_persistence: None, ..Config::default() };
    match config.rng_seed {
        // One that can be printed.
        RngSeed::Random => {
            Config { rng_seed: RngSeed::Fixed(RandomState::new().hash_one(0)), ..config }
        }
        RngSeed::Fixed(_) => config,
    }
}

/// Runs cases until one differs from the model; makes that one small.
fn search(flaw: Flaw, config: Config) -> (Result<(), (Violation, Case)>, Counts) {
    let (counts, last) = (RefCell::new(Counts::default()), RefCell::new(None));
    let result = TestRunner::new(config).run(&case(flaw, OPERATIONS), |case| {
        let (of_case, result) = tree::run(&case);
        counts.borrow_mut().add(&of_case);
        result.map_err(|violation| {
            let why = violation.to_string();
            last.replace(Some(violation));
            TestCaseError::fail(why)
        })
    });
    let result = match (result, last.into_inner()) {
        (Ok(()), _) => Ok(()),
        // A case that differs is smaller than all that have differed before.
        (Err(TestError::Fail(_, case)), Some(violation)) => Err((violation, case)),
        (Err(aborted), _) => panic!("{aborted}"),
    };
    (result, counts.into_inner())
}
