//! Ebb's balloon driver in a guest: loading, parameters, counters and kernel messages.

use ebb_agent::churn::ChurnReport;
use ebb_agent::command_line::BalloonDriver;
use ebb_agent::meminfo::lines;
use ebb_agent::protocol::{Command, Event};

use crate::guest::Guest;
use crate::harness::{Scene, WRONG_CONTENT, eventually, when};
use crate::saved::Restore;
use crate::setup::Setup;

/// All trackers of the driver.
pub const TRACKERS: [&str; 4] = ["percpu", "bitmap", "reporting", "none"];
/// Words that the kernel's log must not contain, in lower case: warnings, bugs, lockups, blocked
/// tasks and their traces.
const COMPLAINTS: [&str; 6] =
    ["warning:", "bug:", "oops", "call trace", "blocked for more than", "bad page"];
/// Path of the driver's counters.
const COUNTERS: &str = "/sys/kernel/debug/ebb_balloon/counters";

/// A guest with Ebb's driver.
pub struct Module {
    /// The guest.
    pub guest: Guest,
    /// Its kernel's release.
    release: String,
}

impl Module {
    /// Starts a guest that loads the driver with these parameters (`NAME=VALUE`).
    #[track_caller]
    pub fn start(setup: Setup<'_>, parameters: &[&str]) -> Self {
        let words: Vec<String> =
            parameters.iter().map(|word| format!("ebb_balloon.{word}")).collect();
        let module = Self::boot(setup, "ebb_balloon", &words.join(" "));
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
        Self::boot(setup, "none", "")
    }

    #[track_caller]
    fn boot(setup: Setup<'_>, driver: &str, words: &str) -> Self {
        let guest = setup.words(&format!("ebb.balloon={driver} {words}")).start();
        let Event::Ready { kernel: release, .. } = guest.wait_ready(1) else { unreachable!() };
        Self { guest, release }
    }

    /// Saves the guest to a file and restores it in another monitor.
    #[track_caller]
    pub fn save_and_restore(self, scene: &Scene) -> Self {
        let file = scene.path("vm.snapshot");
        self.guest.save_and_end(&file);
        Self { guest: Restore::new(scene, &file).start(), release: self.release }
    }

    /// Loads the driver, or returns the error.
    #[track_caller]
    pub fn try_load(&self, parameters: &str) -> Result<(), String> {
        let path = ebb_virtual_host::balloon_module::path_in_guest(&self.release);
        let id = self.guest.send(Command::LoadModule { path, parameters: parameters.to_owned() });
        self.guest.outcome(id).map(drop)
    }

    /// Loads the driver.
    #[track_caller]
    pub fn load(&self, parameters: &str) {
        self.try_load(parameters).unwrap_or_else(|error| panic!("{parameters}: {error}"));
    }

    /// Unloads the driver.
    #[track_caller]
    pub fn unload(&self) {
        self.guest.run(Command::UnloadModule { name: BalloonDriver::EbbBalloon.name().to_owned() });
    }

    /// Sets a parameter at run time.
    #[track_caller]
    pub fn set(&self, name: &str, value: &str) {
        self.guest.write_file(&parameter(name), value);
        assert_eq!(self.guest.read_file(&parameter(name)).trim(), value, "{name}");
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
        let text = self.guest.read_file(COUNTERS);
        let found = lines(&text).find_map(|(of, number)| (of == name).then_some(number));
        found.unwrap_or_else(|| panic!("no counter {name} in:\n{text}"))
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
        assert!(
            complaints.is_empty(),
            "the guest's kernel complains:\n{complaints}\n{}",
            self.kernel_log(&[])
        );
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
        let result = self.guest.outcome(id).unwrap_or_else(|error| panic!("churn: {error}"));
        let report: ChurnReport = serde_json::from_value(result).expect("a report");
        assert!(report.wrong_pages == 0, "{WRONG_CONTENT}: {report:#?}");
        assert!(report.pages_verified > 0, "{report:#?}");
        report
    }
}

/// The file of a parameter.
fn parameter(name: &str) -> String {
    format!("/sys/module/ebb_balloon/parameters/{name}")
}
