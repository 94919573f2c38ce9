() => {
    // Keys: 1-4 vote, u takes the last vote back, ? opens the guidelines; not while somebody is writing.
    const writes = (element) => element.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(element.tagName);
    const shown = (selector) => [...document.querySelectorAll(selector)].find((element) => element.offsetParent !== null);
    document.addEventListener("keydown", (event) => {
        if (event.repeat || event.ctrlKey || event.metaKey || event.altKey) return;
        if (event.key === "Escape" && writes(event.target)) event.target.blur();
        if (writes(event.target)) return;
        let button = null;
        if (/^[1-4uU]$/.test(event.key)) button = shown(`.human-key-${event.key.toLowerCase()}`);
        if (event.key === "?") button = shown("#human-guidelines button");
        if (button) {
            event.preventDefault();
            button.click();
        }
    });
    // The second press of a double click, and a key that bounces, would fall on an item nobody has read.
    const PAUSE = 300; // milliseconds
    let last = -Infinity;
    window.addEventListener("click", (event) => {
        if (!event.target.closest(".human-key")) return;
        if (performance.now() - last < PAUSE) {
            event.stopImmediatePropagation();
            event.preventDefault();
        } else {
            last = performance.now();
        }
    }, true);
}
