//! KSM's settings, which are the host's (/sys/kernel/mm/ksm): they are changed in an order that the
//! kernel accepts, and put back at the end or by the next daemon.
//!
//! Nothing is unmerged for a setting: that takes as much memory as merging has saved. So what can
//! be changed only while no page is merged stays as it is while there are merged pages.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use ebb_page_merge::kernel::knobs::RUN_MERGE;
use ebb_page_merge::kernel::{Counter, Knob, Ksm, KsmError, Values};
use serde::{Deserialize, Serialize};

use crate::store::{Store, StoreError};

/// Some of KSM's settings, by their names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct KsmSettings(BTreeMap<String, Setting>);

/// The value of a setting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "a number, or a word for advisor_mode, is expected")]
enum Setting {
    Number(u64),
    /// Of `advisor_mode`.
    Word(String),
}

impl fmt::Display for Setting {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => number.fmt(formatter),
            Self::Word(word) => word.fmt(formatter),
        }
    }
}

impl KsmSettings {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Looks for mistakes.
    ///
    /// # Errors
    /// The first one.
    pub fn check(&self) -> Result<(), String> {
        let values = self.values()?;
        match values.get(Knob::Run) {
            // Unmerging is no state, but an act of the operator.
            Some(run) if run > RUN_MERGE => Err(format!("run is {run}; give 0 or 1")),
            _ => Ok(()),
        }
    }

    fn values(&self) -> Result<Values, String> {
        let pairs = self.0.iter().map(|(name, setting)| {
            let knob = Knob::named(name).ok_or_else(|| {
                let names = Knob::ALL.map(Knob::name).join(", ");
                format!("there is no setting {name}; there are {names}")
            })?;
            let value = knob.parse(&setting.to_string());
            Ok((knob, value.ok_or_else(|| format!("{name} cannot be {setting}"))?))
        });
        pairs.collect()
    }

    fn of(values: &Values) -> Self {
        let setting = |(knob, value): (Knob, u64)| {
            let text = knob.text(value);
            let setting = text.parse().map_or(Setting::Word(text), Setting::Number);
            (knob.name().to_owned(), setting)
        };
        Self(values.iter().map(setting).collect())
    }
}

/// Why settings are not all as they are to be.
#[derive(Debug, thiserror::Error)]
pub enum Unchanged {
    /// KSM.
    #[error(transparent)]
    Ksm(#[from] KsmError),
    /// What was there before cannot be recorded, and so is not changed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A setting that can only be changed while no page is merged.
    #[error(
        "{knob} stays {present} while {pages_shared} merged pages are there; `echo 2 > \
         /sys/kernel/mm/ksm/run` unmerges them, which takes memory, and then `ebb host settings \
         --reload` changes it"
    )]
    Merged {
        /// The setting.
        knob: &'static str,
        /// Its value.
        present: u64,
        /// Number of merged pages.
        pages_shared: u64,
    },
    /// The settings are wrong.
    #[error("{0}")]
    Wrong(String),
}

/// Gives KSM these settings. Settings that an earlier call has changed and that are not among them
/// are put back.
///
/// # Errors
/// [`Unchanged`]. What could be changed is.
pub fn change(sysfs: &Path, store: &Store, wanted: &KsmSettings) -> Result<(), Unchanged> {
    let mut before = store.ksm().values().map_err(Unchanged::Wrong)?;
    if wanted.is_empty() && before.is_empty() {
        return Ok(());
    }
    let wanted = wanted.values().map_err(Unchanged::Wrong)?;
    let ksm = Ksm::open(sysfs)?;
    let present = ksm.settings()?;
    for (knob, _) in wanted.iter() {
        if before.get(knob).is_none() {
            before.set(knob, present.get(knob).ok_or(KsmError::NoKnob { knob })?);
        }
    }
    // Before they are changed, and so also before a crash.
    store.save_ksm(&KsmSettings::of(&before))?;
    let target: Values =
        before.iter().map(|(knob, before)| (knob, wanted.get(knob).unwrap_or(before))).collect();
    let pages_shared = ksm.counters()?.count(Counter::PagesShared);
    let is_stuck = |knob: Knob, value: u64| {
        knob.needs_nothing_shared() && pages_shared > 0 && present.get(knob) != Some(value)
    };
    ksm.apply(&target.iter().filter(|(knob, value)| !is_stuck(*knob, *value)).collect())?;
    if let Some((knob, _)) = target.iter().find(|(knob, value)| is_stuck(*knob, *value)) {
        let present = present.get(knob).unwrap_or_default();
        return Err(Unchanged::Merged { knob: knob.name(), present, pages_shared });
    }
    let left: Values = before.iter().filter(|(knob, _)| wanted.get(*knob).is_some()).collect();
    Ok(store.save_ksm(&KsmSettings::of(&left))?)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Files like those of /sys/kernel/mm/ksm, and an empty store.
    struct Scene {
        directory: tempfile::TempDir,
        store: Store,
    }

    impl Scene {
        fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            let store = Store::open(&directory.path().join("state")).unwrap();
            fs::create_dir(directory.path().join("ksm")).unwrap();
            let scene = Self { directory, store };
            for (name, text) in [
                ("run", "0"),
                ("pages_to_scan", "100"),
                ("sleep_millisecs", "20"),
                ("merge_across_nodes", "1"),
                ("advisor_mode", "[none] scan-time"),
                ("pages_shared", "0"),
            ] {
                scene.set(name, text);
            }
            scene
        }

        fn set(&self, name: &str, text: &str) {
            fs::write(self.directory.path().join("ksm").join(name), text).unwrap();
        }

        fn get(&self, name: &str) -> String {
            let text = fs::read_to_string(self.directory.path().join("ksm").join(name)).unwrap();
            text.lines().next().unwrap().to_owned()
        }

        fn change(&self, text: &str) -> Result<(), String> {
            let wanted: KsmSettings = toml::from_str(text).unwrap();
            wanted.check()?;
            change(&self.directory.path().join("ksm"), &self.store, &wanted)
                .map_err(|unchanged| unchanged.to_string())
        }
    }

    #[test]
    fn what_was_there_before_is_put_back() {
        let scene = Scene::new();
        scene.change("").unwrap();
        assert!(scene.store.ksm().is_empty());
        scene.change("run = 1\npages_to_scan = 500\nmerge_across_nodes = 0").unwrap();
        let names = ["run", "pages_to_scan", "merge_across_nodes"];
        assert_eq!(names.map(|name| scene.get(name)), ["1", "500", "0"]);
        // As of a daemon that was killed: the next one has the first values.
        scene.change("run = 1\npages_to_scan = 700").unwrap();
        assert_eq!(names.map(|name| scene.get(name)), ["1", "700", "1"]);
        scene.change("").unwrap();
        assert_eq!(names.map(|name| scene.get(name)), ["0", "100", "1"]);
        assert!(scene.store.ksm().is_empty());
        assert_eq!(scene.get("sleep_millisecs"), "20");
    }

    #[test]
    fn nothing_is_unmerged() {
        let scene = Scene::new();
        scene.set("pages_shared", "7");
        let problem = scene.change("run = 1\nmerge_across_nodes = 0").unwrap_err();
        assert!(problem.contains("merge_across_nodes stays 1 while 7 merged pages"), "{problem}");
        assert_eq!((scene.get("run"), scene.get("merge_across_nodes")), ("1".into(), "1".into()));
        scene.change("").unwrap();
        assert_eq!(scene.get("run"), "0");
    }

    #[test]
    fn a_setting_that_this_kernel_lacks_is_named() {
        let scene = Scene::new();
        let problem = scene.change("run = 1\nsmart_scan = 1").unwrap_err();
        assert!(problem.contains("smart_scan"), "{problem}");
        assert_eq!(scene.get("run"), "0");
        fs::remove_file(scene.directory.path().join("ksm/run")).unwrap();
        let problem = scene.change("run = 1").unwrap_err();
        assert!(problem.contains("CONFIG_KSM"), "{problem}");
    }
}
