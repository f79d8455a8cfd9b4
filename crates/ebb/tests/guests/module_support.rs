//! Ebb's balloon driver in a guest: loading, parameters, counters and kernel messages.

use ebb_agent::churn::ChurnReport;
use ebb_agent::command_line::{BalloonDriver, TRACKERS_MODULE};
use ebb_agent::protocol::{Command, Event};
use ebb_virtual_host::balloon_module;

use crate::guest::Guest;
use crate::harness::{Scene, WRONG_CONTENT, eventually, when};
use crate::saved::Restore;
use crate::setup::Setup;

/// All trackers of the driver and of `ebb_trackers`.
pub const TRACKERS: [&str; 4] = ["percpu", "bitmap", "reporting", "none"];
/// Words that the kernel's log must not contain, in lower case: warnings, bugs, lockups, blocked
/// tasks and their traces.
const COMPLAINTS: [&str; 6] =
    ["warning:", "bug:", "oops", "call trace", "blocked for more than", "bad page"];
/// Words of the lines around them: the task, its stack, and what it asked for.
const CIRCUMSTANCES: [&str; 4] = ["comm:", "+0x", "gfp", "failure"];
/// Path of the driver's counters.
const COUNTERS: &str = "/sys/kernel/debug/ebb_balloon/counters";
/// Longest wait for the end of a churn, in seconds: with many vCPUs on a busy machine it takes
/// longer than other commands may.
const CHURN_LIMIT_S: u64 = 240;

/// Modules of a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Modules {
    /// The driver, which has the trackers `none` and `reporting`.
    DriverAlone,
    /// Also `ebb_trackers`.
    WithTrackers,
}

/// A guest with Ebb's driver.
pub struct Module {
    /// The guest.
    pub guest: Guest,
    /// Its kernel's release.
    pub release: String,
    modules: Modules,
}

impl Module {
    /// Starts a guest that loads the driver with these parameters (`NAME=VALUE`).
    #[track_caller]
    pub fn start(setup: Setup<'_>, parameters: &[&str]) -> Self {
        Self::start_modules(setup, Modules::DriverAlone, parameters)
    }

    /// Starts a guest that loads the driver and `ebb_trackers` with these parameters of both.
    #[track_caller]
    pub fn start_with_trackers(setup: Setup<'_>, parameters: &[&str]) -> Self {
        Self::start_modules(setup, Modules::WithTrackers, parameters)
    }

    #[track_caller]
    fn start_modules(setup: Setup<'_>, modules: Modules, parameters: &[&str]) -> Self {
        let mut words: Vec<String> =
            parameters.iter().map(|word| format!("{}.{word}", module_of(word))).collect();
        if modules == Modules::WithTrackers {
            words.push("ebb.trackers".to_owned());
        }
        let module = Self::boot(setup, "ebb_balloon", modules, &words.join(" "));
        let Event::Ready { balloon_driver, warnings, .. } = module.guest.wait_ready(1) else {
            unreachable!()
        };
        assert_eq!(
            (balloon_driver, warnings.as_slice()),
            (BalloonDriver::EbbBalloon, [].as_slice()),
            "is the module built? `make module`"
        );
        module
    }

    /// Starts a guest without any balloon driver.
    #[track_caller]
    pub fn start_without(setup: Setup<'_>) -> Self {
        Self::boot(setup, "none", Modules::DriverAlone, "")
    }

    #[track_caller]
    fn boot(setup: Setup<'_>, driver: &str, modules: Modules, words: &str) -> Self {
        let guest = setup.words(&format!("ebb.balloon={driver} {words}")).start();
        let Event::Ready { kernel: release, .. } = guest.wait_ready(1) else { unreachable!() };
        Self { guest, release, modules }
    }

    /// Saves the guest to a file and restores it in another monitor.
    #[track_caller]
    pub fn save_and_restore(self, scene: &Scene) -> Self {
        let file = scene.path("vm.snapshot");
        self.guest.save_and_end(&file);
        Self { guest: Restore::new(scene, &file).start(), ..self }
    }

    /// Starts another guest without any balloon driver, which is about to continue this one.
    #[track_caller]
    pub fn continued_by(self, setup: Setup<'_>) -> Self {
        let other = Self::start_without(setup);
        Self { guest: other.guest, ..self }
    }

    /// Loads the driver, or returns the error.
    #[track_caller]
    pub fn try_load(&self, parameters: &str) -> Result<(), String> {
        self.try_load_file(balloon_module::path_in_guest(&self.release), parameters)
    }

    /// Loads `ebb_trackers`, or returns the error.
    #[track_caller]
    pub fn try_load_trackers(&self, parameters: &str) -> Result<(), String> {
        self.try_load_file(balloon_module::trackers_path_in_guest(&self.release), parameters)
    }

    fn try_load_file(&self, path: String, parameters: &str) -> Result<(), String> {
        let id = self.guest.send(Command::LoadModule { path, parameters: parameters.to_owned() });
        self.guest.outcome(id).map(drop)
    }

    /// Loads what the test started with, with these parameters.
    #[track_caller]
    pub fn load(&self, parameters: &str) {
        let (of_trackers, of_driver): (Vec<&str>, Vec<&str>) =
            parameters.split(' ').partition(|parameter| module_of(parameter) == TRACKERS_MODULE);
        let mut loaded = self.try_load(&of_driver.join(" "));
        if self.modules == Modules::WithTrackers {
            loaded = loaded.and_then(|()| self.try_load_trackers(&of_trackers.join(" ")));
        }
        loaded.unwrap_or_else(|error| panic!("{parameters}: {error}"));
    }

    /// Unloads a module, or returns the error.
    #[track_caller]
    pub fn try_unload(&self, name: &str) -> Result<(), String> {
        let id = self.guest.send(Command::UnloadModule { name: name.to_owned() });
        self.guest.outcome(id).map(drop)
    }

    /// Unloads what the test started with.
    #[track_caller]
    pub fn unload(&self) {
        let mut unloaded = Ok(());
        if self.modules == Modules::WithTrackers {
            unloaded = self.try_unload(TRACKERS_MODULE);
        }
        unloaded = unloaded.and_then(|()| self.try_unload(BalloonDriver::EbbBalloon.name()));
        unloaded.unwrap_or_else(|error| panic!("{error}"));
    }

    /// Sets a parameter at run time.
    #[track_caller]
    pub fn set(&self, name: &str, value: &str) {
        self.guest.write_file(&parameter(name), value);
        assert_eq!(self.get(name), value, "{name}");
    }

    /// Value of a parameter.
    #[track_caller]
    pub fn get(&self, name: &str) -> String {
        self.guest.read_file(&parameter(name)).trim().to_owned()
    }

    /// Sets a parameter at run time, which must be refused.
    #[track_caller]
    pub fn set_refused(&self, name: &str, value: &str) {
        let command = Command::WriteFile { path: parameter(name), text: value.to_owned() };
        let id = self.guest.send(command);
        self.guest.outcome(id).expect_err("it is refused");
    }

    /// Reads a counter of the driver.
    #[track_caller]
    pub fn counter(&self, name: &str) -> u64 {
        self.guest.value(COUNTERS, name)
    }

    /// Waits until no block is out of the allocator. A pass of a tracker that is on begins at any
    /// time, so a single look can fall into one.
    #[track_caller]
    pub fn await_none_isolated(&self) {
        eventually("all blocks are back in the allocator", 30, || {
            let now = self.counter("isolated_now");
            when(now == 0, || format!("{now} are not"))
        });
    }

    /// Lines of the kernel's log that contain one of these words.
    #[track_caller]
    pub fn kernel_log(&self, words: &[&str]) -> String {
        let words = words.iter().map(|word| (*word).to_owned()).collect();
        self.guest.run(Command::KernelLog { words })["text"].as_str().expect("text").to_owned()
    }

    /// Checks that neither the kernel nor the device reports errors, and that no page is wrong.
    #[track_caller]
    pub fn check_well(&self) {
        let complaints = self.kernel_log(&COMPLAINTS);
        if !complaints.is_empty() {
            // A kernel that restores registers of the processor which KVM does not let it write
            // (DE_CFG after hibernation, Linux 6.12 on an AMD processor) shows a trace, too.
            let refused = self.kernel_log(&["unchecked msr access"]).lines().count();
            let only_traces = complaints.lines().all(|line| line.contains("Call Trace:"));
            assert!(
                complaints.lines().count() <= if only_traces { refused } else { 0 },
                "the guest's kernel complains:\n{complaints}\n{}\n{}",
                self.kernel_log(&CIRCUMSTANCES),
                self.kernel_log(&[])
            );
        }
        let wrong = self.guest.wrong_pages();
        assert!(wrong == 0, "{WRONG_CONTENT}: {wrong} held pages");
        for kind in [
            "broken_queue",
            "outside_ram",
            "bad_address",
            "double_page",
            "discard_failed",
            "extra_statistics",
            "bad_message",
            "message_length",
            "forbidden_encoding",
            "bad_range",
            "extra_request_buffer",
            "short_request_buffer",
        ] {
            assert_eq!(
                self.guest.metric(&format!("ebb_balloon_errors_total{{kind=\"{kind}\"}}")),
                0,
                "{kind}"
            );
        }
    }

    /// Waits until no page is isolated and the guest has at least this much free memory.
    #[track_caller]
    pub fn wait_free(&self, least_free_bytes: u64) {
        eventually("free memory is back", 30, || {
            let free = self.guest.meminfo("MemFree");
            when(free >= least_free_bytes, || format!("{free} of {least_free_bytes} bytes"))
        });
    }

    /// Waits for the end of a churn and checks that no page was wrong.
    #[track_caller]
    pub fn churned(&self, id: u64) -> ChurnReport {
        let result = self.guest.outcome_within(CHURN_LIMIT_S, id);
        let result = result.unwrap_or_else(|error| panic!("churn: {error}"));
        let report: ChurnReport = serde_json::from_value(result).expect("a report");
        assert!(report.wrong_pages == 0, "{WRONG_CONTENT}: {report:#?}");
        assert!(report.pages_verified > 0, "{report:#?}");
        report
    }
}

/// The module that a parameter (`NAME` or `NAME=VALUE`) belongs to.
fn module_of(parameter: &str) -> &'static str {
    if parameter.starts_with("percpu_") || parameter.starts_with("bitmap_") {
        TRACKERS_MODULE
    } else {
        BalloonDriver::EbbBalloon.name()
    }
}

/// The file of a parameter.
fn parameter(name: &str) -> String {
    format!("/sys/module/{}/parameters/{name}", module_of(name))
}
